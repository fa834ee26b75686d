"""Identifiers of the Tinker wire and the resource names behind them.

The SDK computes some of them itself, so their form is given: a model is
`{session}:train:{number}`, a path `tinker://{model}/{kind}/{name}`. Each maps to a resource name
and back without a table: the run of a model is `{session}-train-{number}`, and a run that was made
elsewhere is its own model.

A run has one checkpoint of each name, a model may have three, one of each kind; so the names of two
kinds carry a suffix. A name that may be overwritten carries the number of the save as well, and the
newest of them is meant: a checkpoint is never changed in place.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from tinsmith.names import CheckpointName, RunName, SamplingSessionName, SessionName, is_valid_id
from tinsmith.v1 import checkpoint_pb2
from tinsmith_runtime.errors import CheckpointNotFoundError, InvalidFieldError

_MODEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):train:(\d{1,9})")
_RUN = re.compile(r"(.+)-train-(\d{1,9})")
_PATH = re.compile(r"tinker://([^/]+)/([^/]+)/([^/]+)")
_VERSIONED = re.compile(r"(.+)\.v(\d{1,18})")
_MAX_NAME = 40
_ID_SPACE = uuid.UUID("6f0e2a52-1d0c-4f4e-9a55-3c9b8a1f7d10")

TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
KINDS = (TRAINING, SAMPLER, EXTERNAL)
_SUFFIXES = {TRAINING: "", SAMPLER: ".sampler", EXTERNAL: ".external"}
CHECKPOINT_TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}


def request_id(*parts: object) -> str:
    """Return the request id of a call that is repeated with the same parts: a UUID of them."""
    return str(uuid.uuid5(_ID_SPACE, "/".join(str(part) for part in parts)))


def random_request_id() -> str:
    """Return the request id of a call that is not repeated by its sender."""
    return str(uuid.uuid4())


def session_name(project: str, session_id: str) -> str:
    """Return the resource name of a session.

    Raises:
        InvalidFieldError: If the id cannot be one.
    """
    return str(SessionName(project, _checked(session_id, "session_id")))


def session_of_model(model_id: str) -> str:
    """Return the id of the session that a model was created in; empty if its id does not say."""
    match = _MODEL.fullmatch(model_id)
    return match[1] if match else ""


def run_id_of(model_id: str) -> str:
    """Return the id of the run behind a model.

    Raises:
        InvalidFieldError: If the id cannot be one.
    """
    match = _MODEL.fullmatch(model_id)
    return _checked(f"{match[1]}-train-{match[2]}" if match else model_id, "model_id")


def run_name(project: str, model_id: str) -> str:
    """Return the resource name of the run behind a model.

    Raises:
        InvalidFieldError: If the id cannot be one.
    """
    return str(RunName(project, run_id_of(model_id)))


def run_name_anywhere(model_id: str) -> str:
    """Return the name by which pods ask for the run of a model of whatever project.

    Raises:
        InvalidFieldError: If the id cannot be one.
    """
    return f"projects/-/trainingRuns/{run_id_of(model_id)}"


def model_id_of(run: str) -> str:
    """Return the model behind the resource name or id of a run."""
    run_id = run.rpartition("/")[2]
    match = _RUN.fullmatch(run_id)
    return f"{match[1]}:train:{match[2]}" if match else run_id


def new_model_id(session_id: str, model_seq_id: int) -> str:
    """Return the id that the SDK computes for a model."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id(session_id: str, number: int) -> str:
    """Return the id of a sampling session that a client numbered."""
    return _checked(f"{session_id}-sample-{number}", "sampling_session_seq_id")


def sampling_session_name(project: str, sampling_session: str) -> str:
    """Return the resource name of a sampling session.

    Raises:
        InvalidFieldError: If the id cannot be one.
    """
    name = _checked(sampling_session, "sampling_session_id")
    return str(SamplingSessionName(project, name))


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """`tinker://{model_id}/{kind}/{name}`."""

    model_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, path: str, field: str = "path") -> TinkerPath:
        """Split a path.

        Raises:
            InvalidFieldError: If it is none.
        """
        match = _PATH.fullmatch(path)
        if match is None or match[2] not in KINDS:
            raise InvalidFieldError(
                field, f"must be tinker://<model>/<{'|'.join(KINDS)}>/<name>, got {path[:128]!r}"
            )
        return cls(match[1], match[2], match[3])

    @classmethod
    def of_checkpoint_id(cls, model_id: str, checkpoint_id: str) -> TinkerPath:
        """Return the path of `{kind}/{name}` in a model.

        Raises:
            CheckpointNotFoundError: If the id cannot be one.
        """
        kind, _, name = checkpoint_id.partition("/")
        if kind not in KINDS or not name:
            raise CheckpointNotFoundError(
                f"checkpoint {checkpoint_id[:128]!r} of {model_id} does not exist",
                checkpoint=checkpoint_id[:128],
            )
        return cls(model_id, kind, name)

    @property
    def checkpoint_id(self) -> str:
        """`{kind}/{name}`."""
        return f"{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


def native_checkpoint_id(kind: str, name: str, *, save: int | None = None) -> str:
    """Return the id under which a checkpoint is saved.

    Args:
        kind: One of `KINDS`.
        name: What the client calls it.
        save: Number of the save, for a name that may be overwritten.

    Raises:
        InvalidFieldError: If the name cannot be one.
    """
    if not is_valid_id(name) or len(name) > _MAX_NAME or _is_suffixed(name):
        raise InvalidFieldError(
            "path",
            f"must be 1 to {_MAX_NAME} letters, digits, '-', '_' and '.', begin with a letter or "
            f"digit and not end in .sampler, .external or .v<number>, got {name[:128]!r}",
        )
    version = "" if save is None else f".v{save}"
    return f"{name}{_SUFFIXES[kind]}{version}"


def is_overwriting(checkpoint: str) -> bool:
    """Return whether a checkpoint was saved under a name that may be overwritten."""
    return _VERSIONED.fullmatch(checkpoint.rpartition("/")[2]) is not None


def path_of(checkpoint: checkpoint_pb2.Checkpoint) -> TinkerPath:
    """Return the path of a checkpoint."""
    name = CheckpointName.parse(checkpoint.name)
    kind, stem, _ = _split(name.checkpoint, checkpoint.kind)
    return TinkerPath(model_id_of(name.run), kind, stem)


def newest_match(
    path: TinkerPath, checkpoints: Iterable[checkpoint_pb2.Checkpoint]
) -> checkpoint_pb2.Checkpoint | None:
    """Return which of a run's checkpoints a path means: the one that was saved last."""
    matches = all_matches(path, checkpoints)
    return matches[0] if matches else None


def all_matches(
    path: TinkerPath, checkpoints: Iterable[checkpoint_pb2.Checkpoint]
) -> list[checkpoint_pb2.Checkpoint]:
    """Return the checkpoints that a path has meant, the one that was saved last first."""
    matches = [
        checkpoint
        for checkpoint in checkpoints
        if (found := path_of(checkpoint)).kind == path.kind and found.name == path.name
    ]
    return sorted(matches, key=lambda one: _split(one.name, one.kind)[2], reverse=True)


def _split(
    checkpoint_id: str, kind: checkpoint_pb2.Checkpoint.Kind.ValueType
) -> tuple[str, str, int]:
    """Return kind, name and number of the save."""
    versioned = _VERSIONED.fullmatch(checkpoint_id)
    stem, save = (versioned[1], int(versioned[2])) if versioned else (checkpoint_id, 0)
    for tinker_kind in (EXTERNAL, SAMPLER):
        if stem.endswith(_SUFFIXES[tinker_kind]):
            return tinker_kind, stem.removesuffix(_SUFFIXES[tinker_kind]), save
    is_training = kind == checkpoint_pb2.Checkpoint.KIND_TRAINING
    return (TRAINING if is_training else SAMPLER), stem, save


def _is_suffixed(name: str) -> bool:
    return bool(_VERSIONED.fullmatch(name)) or name.endswith((".sampler", ".external"))


def _checked(value: str, field: str) -> str:
    if not is_valid_id(value):
        raise InvalidFieldError(field, f"is not an id: {value[:128]!r}")
    return value
