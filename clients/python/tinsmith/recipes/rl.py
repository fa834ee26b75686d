"""Reinforcement learning with groups: sample, reward, centre, one step; on policy.

Each problem is sampled `group_size` times; a sample's advantage is its reward minus the mean of its
group (GRPO without the division by the standard deviation, which would weight easy and hard groups
up). Groups in which all samples earn the same teach nothing and are left out. The tokens, their
log-probabilities and the version that sampled them come from the server as they were; the
difference between them and the trainer's own log-probabilities is measured at every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinsmith.client import Client
from tinsmith.recipes import arithmetic
from tinsmith.recipes.arithmetic import MathRecord
from tinsmith.recipes.resume import ResumableRun
from tinsmith.recipes.rl_problems import ProblemSet, load_problems
from tinsmith.recipes.run_log import RunLog, plot_curve
from tinsmith.recipes.schedules import linear_schedule
from tinsmith.recipes.supervised_tasks import complete
from tinsmith.sampler import Sampler
from tinsmith.tokenizer import Tokenizer
from tinsmith.training_run import TrainingRun
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardResult,
    ModelInput,
    SampledSequence,
    SamplingParams,
)

_SEEDS_PER_STEP = 1_000_000
_Z_95 = 1.96


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Settings of the recipe."""

    base_model: str = "tiny"
    data: str = "arithmetic"
    """`arithmetic`, or a JSONL file in GSM8K's layout."""
    adapter: str = "lora"
    """`lora` or `full`."""
    rank: int = 32
    loss: str = "importance_sampling"
    """`importance_sampling` or `ppo`."""
    learning_rate: float = 4e-3
    num_warmup_steps: int = 5
    learning_rate_floor: float = 0.1
    grad_clip_norm: float = 1.0
    num_steps: int = 90
    num_problems: int = 64
    """Problems of a step."""
    group_size: int = 8
    """Samples of each problem."""
    temperature: float = 1.0
    max_tokens: int = 4
    seed: int = 0
    num_validation: int = 256
    """Held-out problems that are scored, at most."""
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
        before: Share of validation problems solved by the untrained run, greedily.
        after: The same after training.
        gain_lower_95: Lower end of the 95 % interval of `after - before`, paired by problem.
        num_validation: Problems scored.
    """

    run: str
    checkpoint: str
    before: float
    after: float
    gain_lower_95: float
    num_validation: int
    curve: list[tuple[float, float]]


def main(config: Config, client: Client) -> Summary:
    """Train, and score validation problems before and after.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    tokenizer = client.get_tokenizer(config.base_model)
    problems = load_problems(config.data)
    validation = problems.validation[: config.num_validation]
    progress = ResumableRun(config, client)
    run = progress.run
    sampler = run.sampler()
    log = RunLog(
        config.output_dir,
        title=f"rl {config.data} seed {config.seed}",
        num_steps=config.num_steps,
        first_step=progress.first_step,
    )
    with log:
        before = progress.once(
            "before", lambda: score(sampler, tokenizer, validation, max_tokens=config.max_tokens)
        )
        _train(config, problems, progress, sampler, tokenizer, log)
        checkpoint = progress.save(config.num_steps, config.checkpoint)
        after = score(sampler, tokenizer, validation, max_tokens=config.max_tokens)
        summary = Summary(
            run.name,
            checkpoint,
            float(np.mean(before)),
            float(np.mean(after)),
            paired_lower_95(before, after),
            len(validation),
            [(row["step"], row["reward"]) for row in log.rows],
        )
        log.say(
            f"validation accuracy {summary.before:.3f} -> {summary.after:.3f} on "
            f"{summary.num_validation} problems (gain at least {summary.gain_lower_95:.3f}, 95 %)"
        )
    plot_curve(
        config.output_dir / "reward.png",
        f"rl: {config.data}, seed {config.seed}",
        {"mean reward of the samples": summary.curve},
        y_label="reward",
    )
    return summary


def score(
    sampler: Sampler, tokenizer: Tokenizer, records: Sequence[MathRecord], *, max_tokens: int
) -> list[float]:
    """Return the reward of the greedy answer to each problem."""
    prompts = [arithmetic.build_prompt(record) for record in records]
    answers = complete(sampler, tokenizer, prompts, max_tokens=max_tokens)
    return [
        arithmetic.reward(record, answer) for record, answer in zip(records, answers, strict=True)
    ]


def paired_lower_95(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the lower end of the 95 % interval of the mean gain, paired by problem.

    A normal approximation of the mean of the differences.
    """
    gains = np.asarray(after) - np.asarray(before)
    deviation = float(gains.std(ddof=1)) if len(gains) > 1 else math.inf
    return float(gains.mean()) - _Z_95 * deviation / math.sqrt(len(gains))


def _train(
    config: Config,
    problems: ProblemSet,
    progress: ResumableRun,
    sampler: Sampler,
    tokenizer: Tokenizer,
    log: RunLog,
) -> None:
    done = progress.first_step
    try:
        for step in range(done, config.num_steps):
            records = problems.draw(step, num_problems=config.num_problems, seed=config.seed)
            groups = _sample_groups(config, sampler, tokenizer, records, step)
            log.add(step, _train_on(config, progress.run, groups, step))
            done = step + 1
            if config.eval_every and done % config.eval_every == 0 and done < config.num_steps:
                validation = problems.validation[: config.num_validation]
                rewards = score(sampler, tokenizer, validation, max_tokens=config.max_tokens)
                log.say(f"step {done}: validation accuracy {np.mean(rewards):.3f}")
            if config.save_every and done % config.save_every == 0 and done < config.num_steps:
                progress.save(done)
    except KeyboardInterrupt:
        if done > progress.first_step:
            progress.save(done)
            log.say(f"saved after step {done}; the same command goes on")
        raise


@dataclass(frozen=True, slots=True)
class _Group:
    """The samples of one problem and what each earned."""

    prompt: list[int]
    samples: list[SampledSequence]
    rewards_G: np.ndarray[tuple[int], np.dtype[np.float64]]

    @property
    def advantages_G(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Rewards less their mean."""
        centred: np.ndarray[tuple[int], np.dtype[np.float64]] = self.rewards_G - np.mean(
            self.rewards_G
        )
        return centred


def _sample_groups(
    config: Config,
    sampler: Sampler,
    tokenizer: Tokenizer,
    records: Sequence[MathRecord],
    step: int,
) -> list[_Group]:
    prompts = [
        tokenizer.apply_chat_template(arithmetic.build_prompt(record), add_generation_prompt=True)
        for record in records
    ]
    futures = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            seed=(config.seed * 1000 + step) * _SEEDS_PER_STEP + index,
        )
        futures.append(sampler.sample(prompt, params, num_samples=config.group_size))
    groups = []
    for record, prompt, future in zip(records, prompts, futures, strict=True):
        samples = future.result().sequences
        rewards = [_reward(tokenizer, record, sample) for sample in samples]
        groups.append(_Group(prompt, samples, np.asarray(rewards, dtype=np.float64)))
    return groups


def _reward(tokenizer: Tokenizer, record: MathRecord, sample: SampledSequence) -> float:
    """Return what a sample earned: nothing if it did not end its turn."""
    if sample.stop_reason != "stop":
        return 0.0
    answer = tokenizer.decode(sample.tokens, skip_special_tokens=True)
    return arithmetic.reward(record, answer)


def _train_on(
    config: Config, run: TrainingRun, groups: Sequence[_Group], step: int
) -> dict[str, float]:
    """Take one step on the groups that differ in reward, and return its metrics."""
    num_samples = sum(len(group.samples) for group in groups)
    metrics = {"reward": float(np.mean([group.rewards_G.mean() for group in groups]))}
    data = [
        _datum(group.prompt, sample, advantage / num_samples)
        for group in groups
        if np.ptp(group.rewards_G) > 0
        for sample, advantage in zip(group.samples, group.advantages_G, strict=True)
    ]
    if not data:
        return {**metrics, "trained_samples": 0.0}
    learning_rate = linear_schedule(
        step,
        peak=config.learning_rate,
        num_steps=config.num_steps,
        num_warmup_steps=config.num_warmup_steps,
        floor=config.learning_rate_floor,
    )
    gradient = run.forward_backward(data, config.loss)
    update = run.optim_step(
        AdamParams(learning_rate=learning_rate, grad_clip_norm=config.grad_clip_norm)
    )
    result = gradient.result()
    update.result()
    return {
        **metrics,
        "trained_samples": float(len(data)),
        "mismatch": _mismatch(data, result),
    }


def _datum(prompt: Sequence[int], sample: SampledSequence, advantage: float) -> Datum:
    """Return a sample as training data: what was read has advantage 0, what was said its own."""
    tokens = [*prompt, *sample.tokens]
    num_read = len(prompt) - 1
    num_said = len(sample.tokens)
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": np.asarray(tokens[1:], dtype=np.int64),
            "logprobs": np.asarray([0.0] * num_read + list(sample.logprobs), dtype=np.float32),
            "advantages": np.asarray([0.0] * num_read + [advantage] * num_said, dtype=np.float32),
        },
    )


def _mismatch(data: Sequence[Datum], result: ForwardResult) -> float:
    """Return the largest difference between sampled and trained log-probabilities."""
    largest = 0.0
    for datum, output in zip(data, result.outputs, strict=True):
        is_said = datum.loss_inputs["advantages"] != 0
        gaps = np.abs(output.logprobs - datum.loss_inputs["logprobs"])[is_said]
        largest = max(largest, float(gaps.max(initial=0.0)))
    return largest
