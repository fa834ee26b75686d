"""The loop of recipes whose data is there beforehand: one step ahead of its results.

The next batch is on its way while the last one is computed, so the trainer never waits for this
process. Every step that was sent counts, whether its result was seen or not: what is saved contains
them all. Ctrl-C saves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tinsmith.recipes.experiment.interrupts import uninterrupted
from tinsmith.recipes.experiment.resume import ResumableRun
from tinsmith.recipes.experiment.run_log import RunLog
from tinsmith.recipes.experiment.settings import TrainingConfig
from tinsmith.recipes.gradient_step import SubmittedStep
from tinsmith.types import ForwardBackwardOutput


@dataclass(slots=True)
class SentStep:
    """A step whose operations are on their way.

    Attributes:
        learning_rate: Of this step.
        submitted: Its operations.
        describe: Returns the metrics that its gradient says.
    """

    learning_rate: float
    submitted: SubmittedStep
    describe: Callable[[ForwardBackwardOutput], Mapping[str, float]]
    is_logged: bool = field(default=False, init=False)

    def finish(self, log: RunLog, step: int, found: Mapping[str, float]) -> None:
        """Wait for the results and log them, once, with what a look at held-out data found."""
        if self.is_logged:
            return
        metrics = {**self.wait(), **found}
        self.is_logged = True
        log.health.note_gradient(metrics["grad_norm"])
        log.add(step, metrics)

    def wait(self) -> dict[str, float]:
        """Wait for the results, and return what they say."""
        return {
            **self.describe(self.submitted.gradient.result()),
            "grad_norm": self.submitted.update.result().metrics["grad_norm"],
            "learning_rate": self.learning_rate,
        }


def train_ahead(
    config: TrainingConfig,
    progress: ResumableRun,
    log: RunLog,
    submit: Callable[[int], SentStep],
    looks_after: Callable[[int], bool],
    look: Callable[[int], Mapping[str, float]],
) -> None:
    """Do the steps that are left.

    Args:
        config: Settings.
        progress: The run and where it stands.
        log: Of the run.
        submit: Sends the step of a number, from 0.
        looks_after: Whether there is a look after so many steps.
        look: Scores the weights after so many steps.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once the state is saved.
    """
    in_flight: deque[tuple[int, SentStep]] = deque()

    def finish(num_left: int, found: Mapping[str, float] | None = None) -> None:
        while len(in_flight) > num_left:
            number, sent = in_flight[0]
            sent.finish(log, number, found or {})
            in_flight.popleft()

    step = progress.first_step
    try:
        while step < config.num_steps:
            with uninterrupted():
                in_flight.append((step, submit(step)))
                step += 1
            finish(num_left=1)
            if looks_after(step):
                # The live weights are those after this step once its result is here.
                in_flight[0][1].wait()
                finish(num_left=0, found=look(step))
            is_last = step == config.num_steps
            if config.save_every and step % config.save_every == 0 and not is_last:
                progress.save(step)
        finish(num_left=0)
    except KeyboardInterrupt:
        if in_flight or step > progress.first_step:
            progress.begin_last_save(step, log.say)
            finish(num_left=0)
            progress.save(step)
        raise
