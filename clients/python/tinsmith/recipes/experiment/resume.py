"""A run that survives Ctrl-C: the same command goes on where the last save left it.

The state file names a training checkpoint and the step that it was saved at. Batches depend on seed
and step alone, so a resumed run sees the data that an undisturbed one would have seen. Whether a
save fits the settings is decided by the folder of the experiment (`Experiment`).
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from tinsmith.client import Client
from tinsmith.errors import (
    AlreadyExistsError,
    ConfigurationError,
    NotFoundError,
    TinsmithError,
    UnimplementedError,
)
from tinsmith.recipes.experiment.beginnings import create_run
from tinsmith.recipes.experiment.experiment import Experiment
from tinsmith.recipes.experiment.json_files import write_json
from tinsmith.recipes.experiment.observer import Observer, SavedState
from tinsmith.recipes.experiment.settings import TrainingConfig
from tinsmith.training.run_forms import TrainingRun

ValueT = TypeVar("ValueT")


class ResumableRun:
    """A training run and where it stands.

    Attributes:
        run: The run.
        first_step: Steps that an earlier part of it did.
        last_step: Steps that it ends with: those of the settings, or those that it did already.
        is_resumed: Whether there was an earlier part.
        begin_from: Resource name of the checkpoint that new runs begin with; empty for initial
            weights.

    Raises:
        ConfigurationError: If the server does not have what the folder goes on from.
    """

    def __init__(
        self,
        config: TrainingConfig,
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
        # A job's own wins.
        self.begin_from = self._observer.begin_from or config.begin_from
        state = experiment.state
        self._saved_step = None if state is None else state.step
        self._reached_step: int | None = None
        self.is_resumed = state is not None
        if state is not None:
            self.run = self._go_on(state)
            self.first_step = state.step
        else:
            self.run = create_run(config, client, self.begin_from)
            self.first_step = 0
        self.last_step = max(config.num_steps, self.first_step)
        experiment.begin(self.run.name)
        self._observer.began(self.run.name, self.first_step)

    @property
    def address(self) -> str:
        """Where the server is."""
        return self._client.address

    def describe(self) -> str:
        """Return where it is and what it begins with, in one sentence."""
        folder, run = self._experiment.folder, self.run.name
        if not self.is_resumed:
            return f"{run} begins; its files are in {folder}{self._left_out()}"
        note = f"; {self._experiment.note}" if self._experiment.note else ""
        return f"{run} goes on after step {self.first_step}; its files are in {folder}{note}"

    def _left_out(self) -> str:
        """Return what no adapter of the model reaches, in words; nothing where all is trained."""
        if not self.run.info.is_lora:
            return ""
        models = {model.base_model: model for model in self._client.list_models()}
        layers = models[self.run.base_model].layers_without_adapters
        return f"; its adapter does not reach {', '.join(layers)}" if layers else ""

    def save(self, step: int, name: str = "") -> str:
        """Save weights and optimizer after a number of steps; return the checkpoint's name."""
        saved = save_named(self._client, self.run, name or unique_name(step))
        experiment = self._experiment
        state = SavedState(self.run.name, saved, step, experiment.fingerprint, experiment.weights)
        experiment.save(state)
        self._saved_step = step
        self._observer.saved(state)
        return saved

    def finish(
        self, summary: Mapping[str, Any], say: Callable[[str], None], *partners: TrainingRun
    ) -> None:
        """Note the end of the training: in its folder, and on the server for lists of runs.

        A server that cannot note it costs a sentence; what was trained is saved.

        Args:
            summary: What came out.
            say: Prints a sentence.
            partners: Runs that were trained beside this one.
        """
        self._experiment.finish(summary)
        for run in (self.run, *partners):
            try:
                run.finish()
            except TinsmithError as error:
                say(f"the server did not note that {run.name} is finished: {error}")

    def begin_last_save(self, step: int, say: Callable[[str], None]) -> None:
        """Say at once, after Ctrl-C, what is saved next and what a second Ctrl-C would lose."""
        self._reached_step = step
        say(f"saving after step {step}; Ctrl-C again gives it up, with {self._loss()}")

    def _loss(self) -> str:
        since = f"since step {self._saved_step}" if self._saved_step else "so far"
        return f"all that was trained {since}"

    def once(self, name: str, compute: Callable[[], ValueT]) -> ValueT:
        """Return a value of the whole run, such as a first score: computed in its first part.

        A part with other settings computes it again, and so does not compare what differs.

        Args:
            name: Of the file that keeps it.
            compute: Returns something that JSON can hold.
        """
        stored: ValueT | None = self.kept(name)
        if stored is not None:
            return stored
        with self._observer.interruptible():
            value = compute()
        write_json(self._path_of(name), value)
        return value

    def kept(self, name: str) -> Any:
        """Return what `once` computed in an earlier part of the run; None if it did not."""
        path = self._path_of(name)
        if not self._experiment.is_unchanged or not path.is_file():
            return None
        return json.loads(path.read_text(encoding="utf-8"))

    def _path_of(self, name: str) -> Path:
        return self._experiment.folder / f"{name}.json"

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
            if self._reached_step is not None and self._reached_step != self._saved_step:
                how = how if self._saved_step else ""
                reached = f"stopped before step {self._reached_step} was saved"
                say(f"{reached}: lost is {self._loss()}{how}")
            elif self._saved_step is None:
                say("stopped before the first step; there is nothing to save")
            else:
                say(f"saved after step {self._saved_step}{how}")
            raise

    def _go_on(self, state: SavedState) -> TrainingRun:
        try:
            run = continue_from(self._client, state.run, state.checkpoint)
        except NotFoundError as error:
            if not self._is_at_a_desk:
                raise
            raise ConfigurationError(
                f"{self._experiment.folder} goes on from {state.checkpoint}, which the server at "
                f"{self._client.address} does not have",
                remedy="begin anew with --overwrite",
            ) from error
        return run


def continue_from(client: Client, name: str, checkpoint: str) -> TrainingRun:
    """Return a run that goes on from a checkpoint; lists show that it is trained again.

    Raises:
        NotFoundError: If there is no such run or checkpoint.
    """
    run = client.runs.get(name)
    with contextlib.suppress(UnimplementedError):  # A server of an earlier release.
        run.reopen()
    run.load_state_with_optimizer(checkpoint).result()
    return run


def unique_name(step: int) -> str:
    """Return the name of a save on the way."""
    return f"step-{step}-{uuid.uuid4().hex[:8]}"


def save_named(client: Client, run: TrainingRun, name: str) -> str:
    """Save weights and optimizer of a run under a name; return the checkpoint's resource name."""
    try:
        return run.save_state(name).result().name
    except AlreadyExistsError:
        # Saved by a part of this run that ended before it could note so.
        client.checkpoints.delete(f"{run.name}/checkpoints/{name}")
        return run.save_state(name).result().name
