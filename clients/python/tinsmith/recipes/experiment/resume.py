"""A run that survives Ctrl-C: the same command goes on where the last save left it.

The state file names a training checkpoint and the step that it was saved at. Batches depend on seed
and step alone, so a resumed run sees the data that an undisturbed one would have seen. Whether a
save fits the settings is decided by the folder of the experiment (`Experiment`).
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from tinsmith.client import Client
from tinsmith.errors import AlreadyExistsError, ConfigurationError, NotFoundError
from tinsmith.recipes.experiment.experiment import Experiment, RunConfig, write_json
from tinsmith.recipes.experiment.observer import Observer, SavedState
from tinsmith.training.training_run import TrainingRun

ValueT = TypeVar("ValueT")


class ResumableRun:
    """A training run and where it stands.

    Attributes:
        run: The run.
        first_step: Steps that an earlier part of it did.
        last_step: Steps that it ends with: those of the settings, or those that it did already.
        is_resumed: Whether there was an earlier part.

    Raises:
        ConfigurationError: If the server does not have what the folder goes on from.
    """

    def __init__(
        self,
        config: RunConfig,
        client: Client,
        experiment: Experiment,
        observer: Observer | None = None,
    ) -> None:
        self._client = client
        self._experiment = experiment
        self._is_at_a_desk = observer is None
        self._same_command = (
            "the same command without --overwrite" if config.overwrite else "the same command"
        )
        self._observer = observer or Observer()
        state = experiment.state
        self._saved_step = None if state is None else state.step
        self.is_resumed = state is not None
        if state is not None:
            self.run = self._go_on(state)
            self.first_step = state.step
        else:
            self.run = _create_run(config, client, self._observer.begin_from)
            self.first_step = 0
        self.last_step = max(config.num_steps, self.first_step)
        experiment.begin(self.run.name)
        self._observer.began(self.run.name, self.first_step)

    def describe(self) -> str:
        """Return where it is and what it begins with, in one sentence."""
        folder, run = self._experiment.folder, self.run.name
        if not self.is_resumed:
            return f"{run} begins; its files are in {folder}"
        note = f"; {self._experiment.note}" if self._experiment.note else ""
        return f"{run} goes on after step {self.first_step}; its files are in {folder}{note}"

    def save(self, step: int, name: str = "") -> str:
        """Save weights and optimizer after a number of steps; return the checkpoint's name."""
        checkpoint = name or f"step-{step}-{uuid.uuid4().hex[:8]}"
        try:
            saved = self.run.save_state(checkpoint).result()
        except AlreadyExistsError:
            # Saved by a part of this run that ended before it could note so.
            self._client.checkpoints.delete(f"{self.run.name}/checkpoints/{checkpoint}")
            saved = self.run.save_state(checkpoint).result()
        experiment = self._experiment
        state = SavedState(
            self.run.name, saved.name, step, experiment.fingerprint, experiment.weights
        )
        experiment.save(state)
        self._saved_step = step
        self._observer.saved(state)
        return saved.name

    def once(self, name: str, compute: Callable[[], ValueT]) -> ValueT:
        """Return a value of the whole run, such as a first score: computed in its first part.

        A part with other settings computes it again, and so does not compare what differs.

        Args:
            name: Of the file that keeps it.
            compute: Returns something that JSON can hold.
        """
        path = self._experiment.folder / f"{name}.json"
        if self._experiment.is_unchanged and path.is_file():
            stored: ValueT = json.loads(path.read_text(encoding="utf-8"))
            return stored
        with self._observer.interruptible():
            value = compute()
        write_json(path, value)
        return value

    @property
    def has_sampler(self) -> bool:
        """Whether the run can be sampled from; where it cannot, nothing is scored."""
        return self._observer.has_sampler

    def interruptible(self) -> AbstractContextManager[object]:
        """Return what surrounds work that changes no weights, and may be given up at any point."""
        return self._observer.interruptible()

    @contextlib.contextmanager
    def explained(self, say: Callable[[str], None]) -> Iterator[None]:
        """Surround the work of a recipe: Ctrl-C says what stands, and how it goes on."""
        try:
            yield
        except KeyboardInterrupt:
            how = f"; {self._same_command} goes on" if self._is_at_a_desk else ""
            if self._saved_step is None:
                say("stopped before the first step; there is nothing to save")
            else:
                say(f"saved after step {self._saved_step}{how}")
            raise

    def _go_on(self, state: SavedState) -> TrainingRun:
        try:
            run = self._client.runs.get(state.run)
            run.load_state_with_optimizer(state.checkpoint).result()
        except NotFoundError as error:
            if not self._is_at_a_desk:
                raise
            raise ConfigurationError(
                f"{self._experiment.folder} goes on from {state.checkpoint}, which the server at "
                f"{self._client.address} does not have",
                remedy="begin anew with --overwrite",
            ) from error
        return run


def _create_run(config: RunConfig, client: Client, begin_from: str) -> TrainingRun:
    display_name = Path(config.data).name
    if begin_from:
        return client.create_training_run_from_checkpoint(begin_from, display_name=display_name)
    if config.adapter == "full":
        return client.create_full_training_run(config.base_model, display_name=display_name)
    return client.create_lora_training_run(
        config.base_model, config.rank, seed=config.seed, display_name=display_name
    )
