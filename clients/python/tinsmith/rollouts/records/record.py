"""One episode as it is kept: columns by token, what it earned, and how it was played.

The row form is a mapping of JSON values, with one key for each field. It is the same in JSONL, in
Parquet and in the page's view; `docs/rollouts.md` lists the fields. What is read is checked here:
a record that exists is consistent in itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tinsmith.environments.plain_values import to_plain
from tinsmith.rollouts.records.errors import RecordError
from tinsmith.rollouts.trajectory import MASKED_VERSION, TerminationReason

SCHEMA = 1
"""Number of the layout; a reader refuses others."""

SERVED, LOCAL, PROBLEM, AGENT = "served", "local", "problem", "agent"
KINDS = (SERVED, LOCAL, PROBLEM, AGENT)
"""How an episode was played: in an environment of the server, in one of the client, as one question
that is answered in one turn, or by a remote agent."""

TOKEN_COLUMNS = ("tokens", "texts", "mask", "logprobs", "advantages", "versions", "turn_indices")
"""Fields with one entry for each token."""
_NUMBER_COLUMNS = ("logprobs", "advantages")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """How an episode was played: what a replay needs."""

    kind: str = SERVED
    """One of `KINDS`."""
    environment: str = ""
    """Name of the environment, the game or the data."""
    environment_config: Mapping[str, Any] = field(default_factory=dict)
    environment_seed: int | None = None
    base_model: str = ""
    checkpoint: str = ""
    """Whose weights played; empty for those of the base model or of a run."""
    run: str = ""
    """Whose live weights played; `versions` says which."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams`; no `seed` means that the draws were left to chance."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `RolloutConfig`."""
    num_samples: int = 1
    """Answers that were drawn by one request."""
    sample_index: int = 0
    """Which of these answers it is."""
    phase: str = ""
    """`train`, `validation`, or empty."""
    step: int | None = None
    """Optimizer steps that were done before."""
    agent: str = ""
    """Which of several policies played."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTurn:
    """One turn of the model and what it led to."""

    num_tokens: int
    stop_reason: str
    reward: float
    info: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str | int, ...] = ()
    """Where the environment said that it ends: strings, then token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedImage:
    """An image that the model read, by digest: its bytes are not kept."""

    position: int
    """Index of its first placeholder among the tokens."""
    num_tokens: int
    format: str
    sha256: str
    width: int
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRecord:
    """One episode; the columns of `TOKEN_COLUMNS` have one entry for each token."""

    episode: str
    """Tells the random draws of the episode from those of others."""
    origin: Origin
    reason: str
    """Why it ended; see `TerminationReason`."""
    failure: str = ""
    is_used: bool = True
    """Whether it counts; not so for one that failed, or that no group took."""
    turns: tuple[RecordedTurn, ...] = ()
    advantage: float | None = None
    """Of the whole episode; None if none was computed, or turns have their own."""
    tokens: Sequence[int] = ()
    """What was read and written; of several samples, one after the other."""
    texts: Sequence[str] = ()
    mask: Sequence[int] = ()
    """1 on sampled tokens."""
    logprobs: Sequence[float] = ()
    advantages: Sequence[float] = ()
    versions: Sequence[int] = ()
    """Weights that sampled each token; -1 where masked."""
    turn_indices: Sequence[int] = ()
    """Turn that each token was sampled in; -1 where masked."""
    sample_starts: tuple[int, ...] = (0,)
    """Where each sample begins among the tokens."""
    images: tuple[RecordedImage, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation as text."""

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def rewards(self) -> list[float]:
        """Reward of each turn."""
        return [turn.reward for turn in self.turns]

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the model emitted."""
        return sum(self.mask)

    def to_row(self) -> dict[str, Any]:
        """Return the row form: JSON values alone, numbers that are none as None."""
        row: dict[str, Any] = {
            "schema": SCHEMA,
            "episode": self.episode,
            **asdict(self.origin),
            "reward": self.reward,
            "advantage": self.advantage,
            "reason": self.reason,
            "failure": self.failure,
            "is_used": self.is_used,
            "rewards": self.rewards,
            "turns": [asdict(turn) for turn in self.turns],
            "sample_starts": list(self.sample_starts),
            "images": [asdict(image) for image in self.images],
            "messages": [dict(message) for message in self.messages],
        }
        # Columns are long, and plain but for numbers that JSON lacks.
        columns = {name: list(getattr(self, name)) for name in TOKEN_COLUMNS}
        for name in _NUMBER_COLUMNS:
            columns[name] = [each if math.isfinite(each) else None for each in columns[name]]
        return {**to_plain(row), **columns}

    @classmethod
    def from_row(cls, row: object) -> EpisodeRecord:
        """Return the record of a row; fields that are not known are ignored.

        Raises:
            RecordError: If a field is missing, of another type, or contradicts another one.
        """
        if not isinstance(row, Mapping):
            raise RecordError("", "is no JSON object")
        if row.get("schema") != SCHEMA:
            raise RecordError("schema", f"is {row.get('schema')!r:.40}, and must be {SCHEMA}")
        values = {name: _read(row, name, check) for name, check in _CHECKS.items()}
        _check_columns(values)
        origin = Origin(**{each.name: values[each.name] for each in fields(Origin)})
        turns = tuple(_read_turn(turn, index) for index, turn in enumerate(values["turns"]))
        images = tuple(_read_image(image, index) for index, image in enumerate(values["images"]))
        record = cls(
            episode=values["episode"],
            origin=origin,
            reason=values["reason"],
            failure=values["failure"],
            # Records of an earlier release are of groups alone.
            is_used=_read({"is_used": True, **row}, "is_used", _BOOL),
            turns=turns,
            advantage=values["advantage"],
            sample_starts=tuple(values["sample_starts"]),
            images=images,
            messages=tuple(values["messages"]),
            **{name: _numbers(name, values[name]) for name in TOKEN_COLUMNS},
        )
        _check_turns(record)
        if record.rewards != values["rewards"]:
            raise RecordError("rewards", "are not those of the turns")
        if record.reward != values["reward"]:
            raise RecordError("reward", f"is {values['reward']}, and turns add to {record.reward}")
        return record


_Check = tuple[Callable[[Any], bool], str]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _all(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


_REASONS = tuple(reason.value for reason in TerminationReason)
_TEXT: _Check = (_is_text, "a text")
_BOOL: _Check = (lambda value: isinstance(value, bool), "true or false")
_WHOLE: _Check = (_is_int, "a whole number")
_WHOLES: _Check = (_all(_is_int), "a list of whole numbers")
_OBJECT: _Check = (_is_object, "an object")
_OBJECTS: _Check = (_all(_is_object), "a list of objects")
_NUMBERS: _Check = (_all(_optional(_is_number)), "a list of numbers")

_CHECKS: Mapping[str, _Check] = {
    "episode": _TEXT,
    "kind": (lambda value: value in KINDS, f"one of {', '.join(KINDS)}"),
    "environment": _TEXT,
    "environment_config": _OBJECT,
    "environment_seed": (_optional(_is_int), "a whole number or null"),
    "base_model": _TEXT,
    "checkpoint": _TEXT,
    "run": _TEXT,
    "sampling": _OBJECT,
    "limits": _OBJECT,
    "num_samples": (lambda value: _is_int(value) and value > 0, "a whole number above 0"),
    "sample_index": (lambda value: _is_int(value) and value >= 0, "a whole number, 0 or more"),
    "phase": _TEXT,
    "step": (_optional(_is_int), "a whole number or null"),
    "agent": _TEXT,
    "reward": (_is_number, "a number"),
    "advantage": (_optional(_is_number), "a number or null"),
    "reason": (lambda value: value in _REASONS, f"one of {', '.join(_REASONS)}"),
    "failure": _TEXT,
    "tokens": _WHOLES,
    "texts": (_all(_is_text), "a list of texts"),
    "mask": (_all(lambda value: _is_int(value) and value in (0, 1)), "a list of 0 and 1"),
    "logprobs": _NUMBERS,
    "advantages": _NUMBERS,
    "versions": _WHOLES,
    "rewards": (_all(_is_number), "a list of numbers"),
    "turn_indices": _WHOLES,
    "turns": _OBJECTS,
    "sample_starts": _WHOLES,
    "images": _OBJECTS,
    "messages": _OBJECTS,
}
_TURN_CHECKS: Mapping[str, _Check] = {
    "num_tokens": (lambda value: _is_int(value) and value > 0, "a whole number above 0"),
    "stop_reason": _TEXT,
    "reward": (_is_number, "a number"),
    "info": _OBJECT,
}
_STOP: _Check = (
    _all(lambda value: _is_text(value) or _is_int(value)),
    "a list of texts and token ids",
)
_IMAGE_CHECKS: Mapping[str, _Check] = {
    "position": _WHOLE,
    "num_tokens": _WHOLE,
    "format": _TEXT,
    "sha256": _TEXT,
    "width": _WHOLE,
    "height": _WHOLE,
}


def _read(row: Mapping[str, Any], name: str, check: _Check, prefix: str = "") -> Any:
    holds, wanted = check
    if name not in row:
        raise RecordError(f"{prefix}{name}", "is missing")
    if not holds(row[name]):
        raise RecordError(f"{prefix}{name}", f"is {row[name]!r:.40}, and must be {wanted}")
    return row[name]


def _read_turn(row: Mapping[str, Any], index: int) -> RecordedTurn:
    prefix = f"turns[{index}]."
    values = {name: _read(row, name, check, prefix) for name, check in _TURN_CHECKS.items()}
    # Records of an earlier release have none.
    stop = _read({"stop": [], **row}, "stop", _STOP, prefix)
    return RecordedTurn(**values, stop=tuple(stop))


def _read_image(row: Mapping[str, Any], index: int) -> RecordedImage:
    prefix = f"images[{index}]."
    return RecordedImage(**{name: _read(row, name, c, prefix) for name, c in _IMAGE_CHECKS.items()})


def _numbers(name: str, values: list[Any]) -> list[Any]:
    """Return a column; a number that JSON lacks is written as null."""
    if name not in _NUMBER_COLUMNS:
        return values
    return [math.nan if value is None else float(value) for value in values]


def _check_columns(values: Mapping[str, Any]) -> None:
    num_tokens = len(values["tokens"])
    for name in TOKEN_COLUMNS:
        if len(values[name]) != num_tokens:
            raise RecordError(name, f"has {len(values[name])} entries for {num_tokens} tokens")
    starts = values["sample_starts"]
    if starts and (starts[0] != 0 or sorted(set(starts)) != starts or starts[-1] >= num_tokens):
        raise RecordError("sample_starts", "must ascend from 0 within the tokens")
    for name in ("versions", "turn_indices"):
        # A version of a sampled token is 0 or more, as is its turn.
        for index, (value, trained) in enumerate(zip(values[name], values["mask"], strict=True)):
            if (value >= 0) != bool(trained) or value < MASKED_VERSION:
                said = "sampled" if trained else "masked"
                raise RecordError(f"{name}[{index}]", f"is {value}, and the token is {said}")


def _check_turns(record: EpisodeRecord) -> None:
    counts = [0] * len(record.turns)
    for index, sampled_in in enumerate(record.turn_indices):
        if sampled_in >= len(counts):
            problem = f"is {sampled_in}, of {len(counts)} turns"
            raise RecordError(f"turn_indices[{index}]", problem)
        if sampled_in >= 0:
            counts[sampled_in] += 1
    for number, (turn, count) in enumerate(zip(record.turns, counts, strict=True)):
        if turn.num_tokens != count:
            raise RecordError(
                f"turns[{number}].num_tokens", f"is {turn.num_tokens}, of {count} sampled tokens"
            )
    for number, image in enumerate(record.images):
        end = image.position + image.num_tokens
        if not 0 <= image.position < end <= len(record.tokens):
            raise RecordError(f"images[{number}].position", "lies outside of the tokens")
