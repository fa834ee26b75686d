"""Supervised fine-tuning: a batch, a gradient, a step, and a look at data that was held out.

The loop keeps one step ahead of its results: the next batch is on its way while the last one is
computed, so the trainer never waits for this process. Ctrl-C saves; the same command goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinsmith.client import Client
from tinsmith.recipes.experiment.experiment import Experiment
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.resume import ResumableRun
from tinsmith.recipes.experiment.rules import check_settings
from tinsmith.recipes.experiment.run_log import RunLog, say_finished
from tinsmith.recipes.experiment.schedules import linear_schedule
from tinsmith.recipes.tasks.supervised_tasks import Evaluation, Example, SupervisedTask, make_task
from tinsmith.rpc.futures import OperationFuture
from tinsmith.training.training_run import TrainingRun
from tinsmith.types import AdamParams, ForwardBackwardOutput, OptimStepResponse


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Settings of the recipe."""

    base_model: str = "tiny"
    data: str = "pig_latin"
    """`pig_latin`, `warm_start`, or a JSONL file of conversations or question and answer."""
    adapter: str = "lora"
    """`lora` or `full`."""
    rank: int = 32
    learning_rate: float = 1e-2
    num_warmup_steps: int = 30
    learning_rate_floor: float = 0.05
    grad_clip_norm: float = 1.0
    num_steps: int = 240
    batch_size: int = 32
    seed: int = 0
    eval_every: int = 0
    """Steps between held-out scores; 0: before and after only."""
    save_every: int = 100
    max_tokens: int = 128
    """Longest answer to a held-out question of a file."""
    output_dir: Path | None = None
    """`runs/supervised-<data>-<n>` if it is left out: a folder of this experiment alone."""
    overwrite: bool = False
    """Whether to begin anew where `output_dir` holds an experiment; `--overwrite` sets it."""
    checkpoint: str = "final"
    """Name of the checkpoint at the end."""

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Summary:
    """What came out of a run."""

    run: str
    checkpoint: str
    before: Evaluation
    after: Evaluation
    losses: list[float]


def main(config: Config, client: Client, observer: Observer | None = None) -> Summary:
    """Train, and score what was held out before and after.

    Of an experiment that ended, nothing is repeated: what came out is returned.

    Raises:
        ConfigurationError: If the data cannot be read, or `output_dir` holds another experiment.
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    # All that can be wrong with the data is found before anything is made on the server.
    task = make_task(
        config.data,
        client.get_tokenizer(config.base_model),
        batch_size=config.batch_size,
        seed=config.seed,
        max_tokens=config.max_tokens,
    )
    with Experiment("supervised", config, observer) as experiment:
        if experiment.summary is not None:
            summary = _read_summary(experiment.summary)
            say_finished(experiment, _describe(summary))
            return summary
        progress = ResumableRun(config, client, experiment, observer)
        log = RunLog(
            experiment.folder,
            title=f"supervised {Path(config.data).name}",
            num_steps=config.num_steps,
            first_step=progress.first_step,
            observer=observer,
        )
        with log, progress.explained(log.say):
            log.say_begin(progress.describe(), f"trains on {task.description}")
            before = Evaluation(progress.once("before", lambda: _score(task, progress).metrics))
            _train(config, task, progress, log)
            checkpoint = progress.save(progress.last_step, config.checkpoint)
            after = _score(task, progress)
            losses = [row["loss"] for row in log.rows]
            summary = Summary(progress.run.name, checkpoint, before, after, losses)
            log.plot(f"supervised: {config.data}", "loss", y_label="loss per trained token")
            experiment.finish(asdict(summary))
            log.say_end(_describe(summary), summary.run, summary.checkpoint)
    return summary


def _describe(summary: Summary) -> list[str]:
    return [
        f"{key}: {summary.before.metrics.get(key, float('nan')):.3f} -> {value:.3f}"
        for key, value in summary.after.metrics.items()
    ]


def _read_summary(content: Mapping[str, Any]) -> Summary:
    """Return what came out of an experiment that ended."""
    before, after = (
        Evaluation(part["metrics"], [Example(**example) for example in part["examples"]])
        for part in (content["before"], content["after"])
    )
    return Summary(content["run"], content["checkpoint"], before, after, content["losses"])


def _train(config: Config, task: SupervisedTask, progress: ResumableRun, log: RunLog) -> None:
    run = progress.run
    # Every step that was submitted is in here until it is logged: what is saved contains them all.
    in_flight: deque[_Step] = deque()

    def finish(num_left: int) -> None:
        while len(in_flight) > num_left:
            in_flight[0].finish(log)
            in_flight.popleft()

    step = progress.first_step
    try:
        while step < config.num_steps:
            in_flight.append(_submit(config, task, run, step))
            step += 1
            finish(num_left=1)
            if step == config.num_steps:
                break
            if config.eval_every and step % config.eval_every == 0:
                finish(num_left=0)
                log.say(f"step {step}: {_score(task, progress).metrics}")
            if config.save_every and step % config.save_every == 0:
                progress.save(step)
        finish(num_left=0)
    except KeyboardInterrupt:
        if in_flight or step > progress.first_step:
            finish(num_left=0)
            progress.save(step)
        raise


def _score(task: SupervisedTask, progress: ResumableRun) -> Evaluation:
    """Score what was held out, unless no sampler is there."""
    return task.evaluate(progress.run.sampler()) if progress.has_sampler else Evaluation({})


@dataclass(slots=True)
class _Step:
    """A step whose operations are on their way."""

    step: int
    learning_rate: float
    gradient: OperationFuture[ForwardBackwardOutput]
    update: OperationFuture[OptimStepResponse]
    is_logged: bool = False

    def finish(self, log: RunLog) -> None:
        """Wait for the results and log them, once."""
        if self.is_logged:
            return
        loss = self.gradient.result().loss
        norm = self.update.result().metrics["grad_norm"]
        self.is_logged = True
        log.health.note_gradient(norm)
        log.add(
            self.step,
            {"loss": loss, "grad_norm": norm, "learning_rate": self.learning_rate},
        )


def _submit(config: Config, task: SupervisedTask, run: TrainingRun, step: int) -> _Step:
    learning_rate = linear_schedule(
        step,
        peak=config.learning_rate,
        num_steps=config.num_steps,
        num_warmup_steps=config.num_warmup_steps,
        floor=config.learning_rate_floor,
    )
    gradient = run.forward_backward(task.batch(step), "cross_entropy")
    update = run.optim_step(
        AdamParams(learning_rate=learning_rate, grad_clip_norm=config.grad_clip_norm)
    )
    return _Step(step, learning_rate, gradient, update)
