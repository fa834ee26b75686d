"""Reinforcement learning with groups: play, reward, centre, one step; on policy.

Each task is played `group_size` times; a play's advantage is its reward minus the mean of its
group. This is GRPO without the division by the standard deviation, which would weight easy and hard
groups up. Groups in which all plays earn the same teach nothing and are left out. Tokens,
log-probabilities and the version that sampled them come from the server as they were; the
difference between them and the trainer's own log-probabilities is measured at every step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.experience_sources import (
    EnvironmentSource,
    Experience,
    ProblemSource,
    Source,
    SourceConfig,
)
from tinsmith.recipes.experiment.experiment import Experiment
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.resume import ResumableRun
from tinsmith.recipes.experiment.rules import check_settings
from tinsmith.recipes.experiment.run_log import RunLog, say_finished
from tinsmith.recipes.experiment.schedules import linear_schedule
from tinsmith.recipes.tasks.rl_problems import load_problems
from tinsmith.rollouts import DatumArrays
from tinsmith.rpc.futures import OperationFuture
from tinsmith.sampling.sampler import Sampler
from tinsmith.training.training_run import TrainingRun
from tinsmith.types import AdamParams, ForwardBackwardOutput, OptimStepResponse

_Z_95 = 1.96


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Settings of the recipe."""

    base_model: str = "tiny"
    data: str = "arithmetic"
    """`arithmetic`, or a JSONL file in GSM8K's layout."""
    environment: str = ""
    """Name of a served environment, such as `guessing`, to play instead of `data`."""
    adapter: str = "lora"
    """`lora` or `full`."""
    rank: int = 32
    loss: str = "importance_sampling"
    """`importance_sampling`, `ppo`, `cispo` or `dro`."""
    learning_rate: float = 4e-3
    num_warmup_steps: int = 5
    learning_rate_floor: float = 0.1
    grad_clip_norm: float = 1.0
    num_steps: int = 75
    num_problems: int = 48
    """Problems, or seeds of the environment, of a step."""
    group_size: int = 8
    """Plays of each."""
    temperature: float = 1.0
    max_tokens: int = 4
    """Sampled tokens of a turn."""
    seed: int = 0
    num_validation: int = 256
    """Held-out tasks that are scored, at most."""
    eval_every: int = 0
    """Steps between scores; 0: before and after only."""
    save_every: int = 50
    output_dir: Path | None = None
    """`runs/rl-<data>-<n>` if it is left out: a folder of this experiment alone."""
    overwrite: bool = False
    """Whether to begin anew where `output_dir` holds an experiment; `--overwrite` sets it."""
    checkpoint: str = "final"
    """Name of the checkpoint at the end."""

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Summary:
    """What came out of a run.

    Attributes:
        before: Mean reward on validation tasks of the untrained run, greedily.
        after: The same after training.
        gain_lower_95: Lower end of the 95 % interval of `after - before`, paired by task.
        num_validation: Tasks scored.
    """

    run: str
    checkpoint: str
    before: float
    after: float
    gain_lower_95: float
    num_validation: int


def main(config: Config, client: Client, observer: Observer | None = None) -> Summary:
    """Train, and score validation tasks before and after.

    Of an experiment that ended, nothing is repeated: what came out is returned.

    Raises:
        ConfigurationError: If the data cannot be read, the environment is not served, or
            `output_dir` holds another experiment.
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    # All that can be wrong with the data is found before anything is made on the server.
    make_source = _prepare(config, client)
    with Experiment("rl", config, observer) as experiment:
        if experiment.summary is not None:
            summary = Summary(**experiment.summary)
            say_finished(experiment, [_describe(summary)])
            return summary
        progress = ResumableRun(config, client, experiment, observer)
        source = make_source(progress.run.sampler())
        name = config.environment or Path(config.data).name
        log = RunLog(
            experiment.folder,
            title=f"rl {name} seed {config.seed}",
            num_steps=config.num_steps,
            first_step=progress.first_step,
            observer=observer,
        )
        with log, progress.explained(log.say):
            log.say_begin(progress.describe())
            before = progress.once("before", source.score)
            _train(config, source, progress, log)
            checkpoint = progress.save(progress.last_step, config.checkpoint)
            after = source.score()
            summary = Summary(
                progress.run.name,
                checkpoint,
                _mean(before),
                _mean(after),
                paired_lower_95(before, after),
                len(after),
            )
            log.plot(
                f"rl: {name}, seed {config.seed}", "reward", y_label="mean reward of the plays"
            )
            experiment.finish(asdict(summary))
            log.say_end([_describe(summary)], summary.run, summary.checkpoint)
    return summary


def _describe(summary: Summary) -> str:
    return (
        f"validation reward {summary.before:.3f} -> {summary.after:.3f} on "
        f"{summary.num_validation} tasks (gain at least {summary.gain_lower_95:.3f}, 95 %)"
    )


def paired_lower_95(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the lower end of the 95 % interval of the mean gain, paired by task.

    A normal approximation of the mean of the differences.
    """
    if not len(after):
        return math.nan
    gains = np.asarray(after) - np.asarray(before)
    deviation = float(gains.std(ddof=1)) if len(gains) > 1 else math.inf
    return float(gains.mean()) - _Z_95 * deviation / math.sqrt(len(gains))


def _prepare(config: Config, client: Client) -> Callable[[Sampler], Source]:
    """Read what is played, and return what makes a source of it.

    Raises:
        ConfigurationError: If it cannot be read, or the environment is not served.
    """
    settings = SourceConfig(
        num_tasks=config.num_problems,
        group_size=config.group_size,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        num_validation=config.num_validation,
        seed=config.seed,
    )
    tokenizer = client.get_tokenizer(config.base_model)
    if not config.environment:
        problems = load_problems(config.data)
        return lambda sampler: ProblemSource(settings, sampler, tokenizer, problems)
    names = [each.name.rpartition("/")[2] for each in client.environments.list()]
    if config.environment not in names:
        raise ConfigurationError(
            f"no environment {config.environment} is served",
            remedy=f"give environment= one of {', '.join(sorted(names))}",
        )
    served = {model.base_model: model for model in client.list_models()}
    max_context_tokens = served[config.base_model].max_context_tokens
    return lambda sampler: EnvironmentSource(
        settings,
        sampler,
        tokenizer,
        client,
        config.environment,
        max_context_tokens=max_context_tokens,
    )


def _train(config: Config, source: Source, progress: ResumableRun, log: RunLog) -> None:
    done = progress.first_step
    try:
        for step in range(done, config.num_steps):
            with progress.interruptible():
                experience = source.play(step)
            submitted = _submit(config, progress.run, experience, step)
            # From here on a save contains the step, whether its result was seen or not.
            done = step + 1
            metrics = _metrics(experience, submitted)
            log.health.note_trained(len(experience.sequences))
            if "grad_norm" in metrics:
                log.health.note_gradient(metrics["grad_norm"])
            log.add(step, metrics)
            if done == config.num_steps:
                break
            if config.eval_every and done % config.eval_every == 0:
                log.say(f"step {done}: validation reward {_mean(source.score()):.3f}")
            if config.save_every and done % config.save_every == 0:
                progress.save(done)
    except KeyboardInterrupt:
        if done > progress.first_step:
            progress.save(done)
        raise


@dataclass(frozen=True, slots=True)
class _Submitted:
    """The operations of a step, on their way."""

    gradient: OperationFuture[ForwardBackwardOutput]
    update: OperationFuture[OptimStepResponse]


def _submit(
    config: Config, run: TrainingRun, experience: Experience, step: int
) -> _Submitted | None:
    """Send a step, unless there is nothing to learn from."""
    if not experience.sequences:
        return None
    # The service sums over tokens; the mean over plays is the recipe's choice.
    data = [
        dataclasses.replace(
            arrays, advantages=arrays.advantages / np.float32(experience.num_plays)
        ).to_datum()
        for arrays in experience.sequences
    ]
    learning_rate = linear_schedule(
        step,
        peak=config.learning_rate,
        num_steps=config.num_steps,
        num_warmup_steps=config.num_warmup_steps,
        floor=config.learning_rate_floor,
    )
    return _Submitted(
        run.forward_backward(data, config.loss),
        run.optim_step(
            AdamParams(learning_rate=learning_rate, grad_clip_norm=config.grad_clip_norm)
        ),
    )


def _metrics(experience: Experience, submitted: _Submitted | None) -> dict[str, float]:
    """Wait for a step, and return what it says."""
    metrics = {
        "reward": experience.mean_reward,
        "trained": float(len(experience.sequences)),
        **experience.metrics,
    }
    if submitted is None:
        return metrics
    result = submitted.gradient.result()
    grad_norm = submitted.update.result().metrics["grad_norm"]
    return {
        **metrics,
        "grad_norm": grad_norm,
        "mismatch": _mismatch(experience.sequences, result),
    }


def _mean(rewards: Sequence[float]) -> float:
    """Return the mean; NaN if there is nothing."""
    return float(np.mean(rewards)) if len(rewards) else math.nan


def _mismatch(sequences: Sequence[DatumArrays], result: ForwardBackwardOutput) -> float:
    """Return the largest difference between sampled and trained log-probabilities."""
    gaps = [
        float(np.abs(output.logprobs - arrays.logprobs)[arrays.mask > 0].max(initial=0.0))
        for arrays, output in zip(sequences, result.outputs, strict=True)
    ]
    return max(gaps)
