"""A run that survives Ctrl-C: the same command goes on where the last save left it.

The state file names a training checkpoint and the step that it was saved at. Batches depend on seed
and step alone, so a resumed run sees the data that an undisturbed one would have seen. Other
settings begin a new run, unless the observer says that they may change on the way: a job that is
edited goes on from what it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tinsmith.client import Client
from tinsmith.errors import AlreadyExistsError
from tinsmith.recipes.observer import Observer, SavedState
from tinsmith.training_run import TrainingRun

STATE_FILE = "state.json"

ValueT = TypeVar("ValueT")


class RunConfig(Protocol):
    """The settings that every recipe has."""

    @property
    def base_model(self) -> str: ...  # noqa: D102
    @property
    def data(self) -> str: ...  # noqa: D102
    @property
    def adapter(self) -> str: ...  # noqa: D102
    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def num_steps(self) -> int: ...  # noqa: D102
    @property
    def output_dir(self) -> Path: ...  # noqa: D102


class ResumableRun:
    """A training run and where it stands.

    Attributes:
        run: The run.
        first_step: Steps that an earlier part of it did.
        last_step: Steps that it ends with: those of the settings, or those that it did already.
        is_resumed: Whether there was an earlier part.
    """

    def __init__(self, config: RunConfig, client: Client, observer: Observer | None = None) -> None:
        self._client = client
        self._observer = observer or Observer()
        self._directory = config.output_dir
        self._directory.mkdir(parents=True, exist_ok=True)
        self._fingerprint = _fingerprint(config)
        self._weights = _describe_weights(config)
        state = self._read_state(config.num_steps)
        self.is_resumed = state is not None
        # What was computed once under other settings can not be compared with what comes.
        self._is_unchanged = state is not None and state.fingerprint == self._fingerprint
        if state is not None:
            self.run = client.get_run(state.run)
            self.run.load_state_with_optimizer(state.checkpoint).result()
            self.first_step = state.step
        else:
            self.run = _create_run(config, client, self._observer.begin_from)
            self.first_step = 0
        self.last_step = max(config.num_steps, self.first_step)
        self._observer.began(self.run.name, self.first_step)

    def save(self, step: int, name: str = "") -> str:
        """Save weights and optimizer after a number of steps; return the checkpoint's name."""
        checkpoint = name or f"step-{step}-{uuid.uuid4().hex[:8]}"
        try:
            saved = self.run.save_state(checkpoint).result()
        except AlreadyExistsError:
            # Saved by a part of this run that ended before it could note so.
            self._client.delete_checkpoint(f"{self.run.name}/checkpoints/{checkpoint}")
            saved = self.run.save_state(checkpoint).result()
        state = SavedState(self.run.name, saved.name, step, self._fingerprint, self._weights)
        _replace(self._directory / STATE_FILE, asdict(state))
        self._observer.saved(state)
        return saved.name

    def once(self, name: str, compute: Callable[[], ValueT]) -> ValueT:
        """Return a value of the whole run, such as a first score: computed in its first part.

        A part with other settings computes it again, and so does not compare what differs.

        Args:
            name: Of the file that keeps it.
            compute: Returns something that JSON can hold.
        """
        path = self._directory / f"{name}.json"
        if self._is_unchanged and path.is_file():
            stored: ValueT = json.loads(path.read_text(encoding="utf-8"))
            return stored
        with self._observer.interruptible():
            value = compute()
        _replace(path, value)
        return value

    @property
    def has_sampler(self) -> bool:
        """Whether the run can be sampled from; where it can not, nothing is scored."""
        return self._observer.has_sampler

    def interruptible(self) -> AbstractContextManager[object]:
        """Return what surrounds work that changes no weights, and may be given up at any point."""
        return self._observer.interruptible()

    def _read_state(self, num_steps: int) -> SavedState | None:
        """Return what is gone on from, if anything."""
        path = self._directory / STATE_FILE
        if not path.is_file():
            return None
        state = SavedState(**json.loads(path.read_text(encoding="utf-8")))
        is_unchanged = state.fingerprint == self._fingerprint
        if self._observer.may_change:
            return state if is_unchanged or state.weights == self._weights else None
        return state if is_unchanged and state.step < num_steps else None


def _create_run(config: RunConfig, client: Client, begin_from: str) -> TrainingRun:
    display_name = Path(config.data).name
    if begin_from:
        return client.create_training_run_from_checkpoint(begin_from, display_name=display_name)
    if config.adapter == "full":
        return client.create_full_training_run(config.base_model, display_name=display_name)
    if config.adapter != "lora":
        raise ValueError(f"adapter must be lora or full, got {config.adapter!r}")
    return client.create_lora_training_run(
        config.base_model, config.rank, seed=config.seed, display_name=display_name
    )


def _describe_weights(config: RunConfig) -> str:
    """Name what a checkpoint must have been trained as for this configuration to go on from it."""
    adapter = f"lora of rank {config.rank}" if config.adapter == "lora" else config.adapter
    return f"{config.base_model}, {adapter}"


def _fingerprint(config: RunConfig) -> str:
    """Name the settings that decide what is trained; where it is written is not one of them."""
    values: dict[str, Any] = asdict(config)  # type: ignore[call-overload]
    values.pop("output_dir")
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _replace(path: Path, value: object) -> None:
    """Write a JSON file; complete or unchanged."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    temporary.replace(path)
