"""Reinforcement learning with groups: play, reward, centre, one step; on policy.

Each task is played `group_size` times; a play's advantage is its reward minus the mean of its group
(GRPO without the division by the standard deviation, which would weight easy and hard groups up).
Groups in which all plays earn the same teach nothing and are left out. Tokens, log-probabilities
and the version that sampled them come from the server as they were; the difference between them and
the trainer's own log-probabilities is measured at every step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinsmith.client import Client
from tinsmith.futures import OperationFuture
from tinsmith.recipes.observer import Observer
from tinsmith.recipes.resume import ResumableRun
from tinsmith.recipes.rl_problems import load_problems
from tinsmith.recipes.rl_sources import (
    EnvironmentSource,
    Experience,
    ProblemSource,
    Source,
    SourceConfig,
)
from tinsmith.recipes.run_log import RunLog, plot_curve
from tinsmith.recipes.schedules import linear_schedule
from tinsmith.rollouts import DatumArrays
from tinsmith.sampler import Sampler
from tinsmith.training_run import TrainingRun
from tinsmith.types import AdamParams, ForwardResult, OptimStepResult

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
    """`importance_sampling` or `ppo`."""
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
    output_dir: Path = Path("runs/rl")
    checkpoint: str = "final"
    """Name of the checkpoint at the end."""


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

    Raises:
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    progress = ResumableRun(config, client, observer)
    source = _make_source(config, client, progress.run.sampler())
    name = config.environment or Path(config.data).name
    log = RunLog(
        config.output_dir,
        title=f"rl {name} seed {config.seed}",
        num_steps=config.num_steps,
        first_step=progress.first_step,
        observer=observer,
    )
    with log:
        before = progress.once("before", source.score)
        _train(config, source, progress, log)
        checkpoint = progress.save(progress.last_step, config.checkpoint)
        after = source.score()
        summary = Summary(
            progress.run.name,
            checkpoint,
            float(np.mean(before)),
            float(np.mean(after)),
            paired_lower_95(before, after),
            len(after),
        )
        log.say(
            f"validation reward {summary.before:.3f} -> {summary.after:.3f} on "
            f"{summary.num_validation} tasks (gain at least {summary.gain_lower_95:.3f}, 95 %)"
        )
    plot_curve(
        config.output_dir / "reward.png",
        f"rl: {name}, seed {config.seed}",
        {"mean reward of the plays": [(row["step"], row["reward"]) for row in log.rows]},
        y_label="reward",
    )
    return summary


def paired_lower_95(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the lower end of the 95 % interval of the mean gain, paired by task.

    A normal approximation of the mean of the differences.
    """
    gains = np.asarray(after) - np.asarray(before)
    deviation = float(gains.std(ddof=1)) if len(gains) > 1 else math.inf
    return float(gains.mean()) - _Z_95 * deviation / math.sqrt(len(gains))


def _make_source(config: Config, client: Client, sampler: Sampler) -> Source:
    settings = SourceConfig(
        num_tasks=config.num_problems,
        group_size=config.group_size,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        num_validation=config.num_validation,
        seed=config.seed,
    )
    tokenizer = client.get_tokenizer(config.base_model)
    if config.environment:
        served = {model.base_model: model for model in client.get_capabilities()}
        return EnvironmentSource(
            settings,
            sampler,
            tokenizer,
            client,
            config.environment,
            max_context_tokens=served[config.base_model].max_context_tokens,
        )
    return ProblemSource(settings, sampler, tokenizer, load_problems(config.data))


def _train(config: Config, source: Source, progress: ResumableRun, log: RunLog) -> None:
    done = progress.first_step
    try:
        for step in range(done, config.num_steps):
            with progress.interruptible():
                experience = source.play(step)
            submitted = _submit(config, progress.run, experience, step)
            # From here on a save contains the step, whether its result was seen or not.
            done = step + 1
            log.add(step, _metrics(experience, submitted))
            if done == config.num_steps:
                break
            if config.eval_every and done % config.eval_every == 0:
                log.say(f"step {done}: validation reward {np.mean(source.score()):.3f}")
            if config.save_every and done % config.save_every == 0:
                progress.save(done)
    except KeyboardInterrupt:
        if done > progress.first_step:
            progress.save(done)
            log.say(f"saved after step {done}; the same command goes on")
        raise


@dataclass(frozen=True, slots=True)
class _Submitted:
    """The operations of a step, on their way."""

    gradient: OperationFuture[ForwardResult]
    update: OperationFuture[OptimStepResult]


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
    submitted.update.result()
    return {**metrics, "mismatch": _mismatch(experience.sequences, result)}


def _mismatch(sequences: Sequence[DatumArrays], result: ForwardResult) -> float:
    """Return the largest difference between sampled and trained log-probabilities."""
    gaps = [
        float(np.abs(output.logprobs - arrays.logprobs)[arrays.mask > 0].max(initial=0.0))
        for arrays, output in zip(sequences, result.outputs, strict=True)
    ]
    return max(gaps)
