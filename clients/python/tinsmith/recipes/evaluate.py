"""Evaluation: base models, checkpoints and runs play what they are not trained on.

It is the play of training and validation without a gradient: the same runner, the same seeds, the
same tokens. The mean has a 95 % interval, by the normal approximation over tasks. Each task may be
played several times, which gives pass@k. Of several, each is compared with the first one, paired by
task, and their answers are written side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.names import shorten
from tinsmith.recipes.evaluation.showing import draw, show, side_by_side
from tinsmith.recipes.evaluation.summaries import Played, RememberingKeeper, Summary, summarize
from tinsmith.recipes.experience import Source, SourceConfig
from tinsmith.recipes.experiment.experiment import remove_rollouts, slug, slugify
from tinsmith.recipes.experiment.json_files import write_json, write_lines
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.rules import check_settings
from tinsmith.recipes.experiment.run_log import METRICS
from tinsmith.recipes.experiment.settings import PlayConfig
from tinsmith.recipes.kept_rollouts import RolloutKeeper
from tinsmith.recipes.named_source import NamedSource, plan_environments
from tinsmith.recipes.problem_source import ProblemSource
from tinsmith.recipes.rewarded_source import RewardedData, check_judge
from tinsmith.recipes.tasks.rl_problems import load_problems
from tinsmith.sampling.sampler_forms import Sampler

__all__ = ["Config", "Summary", "main"]

_ROOT = Path("runs")
_CONFIG_FILE = "config.json"
ANSWERS = "answers.jsonl"
"""File with a row for each task: what was asked, and what was said to it."""
_MOST_REPORTED = 64
"""Figures that the status of a job has room for."""


@dataclass(frozen=True, kw_only=True)
class Config(PlayConfig):
    """Settings of the recipe."""

    base_model: str = ""
    """Name of a base model that plays; of this, `checkpoint` and `run` at least one is given, and
    each may be several with commas. The first is what others are compared with."""
    checkpoint: str = ""
    """A checkpoint that plays, `run-1/final`."""
    run: str = ""
    """Name or id of a run whose newest weights play."""
    data: str = "arithmetic"
    """`arithmetic`, `small_sums`, or a JSONL file, a folder or `hf://NAME` in GSM8K's layout, of
    which the held-out part is scored."""
    num_validation: int = 256
    """Tasks that are played, at most."""
    num_samples: int = 1
    """Plays of each task; several give pass@k where tasks say `is_success`."""
    temperature: float = 0.0
    """Of what is sampled; 0 is greedy, and several plays of a task would be alike."""
    seed: int = 0
    max_tokens: int = 4
    """Sampled tokens of a turn."""
    output_dir: Path | None = None
    """`runs/evaluate-<data>-<n>` if it is left out."""
    overwrite: bool = False
    """Whether results that `output_dir` holds are replaced."""

    def __post_init__(self) -> None:
        # The name of a checkpoint that exists is no id for a new one.
        check_settings(self, without=("checkpoint", "temperature"))
        check_judge(self)
        if not 0 <= self.temperature < math.inf:
            raise ConfigurationError(
                f"temperature is {self.temperature!r}", remedy="give a number, 0 or more"
            )
        if self.num_samples > 1 and not self.temperature:
            raise ConfigurationError(
                f"num_samples is {self.num_samples}, and greedy plays of a task are alike",
                remedy="add temperature=1, or another number above 0",
            )


def main(config: Config, client: Client, observer: Observer | None = None) -> list[Summary]:
    """Play, write `metrics.jsonl` and `answers.jsonl`, and show a table.

    Each that has played is a step to the observer, and what stops it leaves nothing to go on from.

    Raises:
        ConfigurationError: If no source of weights is given, or if the environment is not there,
            the data cannot be read or the folder is taken.
    """
    observer = observer or Observer()
    samplers = _open(config, client)
    make_sources = [_prepare(config, client, sampler) for sampler in samplers.values()]
    folder = _folder(config)
    remove_rollouts(folder)
    plays: dict[str, Played] = {}
    summaries: list[Summary] = []
    for number, (weights, sampler) in enumerate(samplers.items()):
        agent = f"{number}-{slugify(weights)}" if len(samplers) > 1 else ""
        keeper = RememberingKeeper(folder, config.keep_rollouts, sampler, agent)
        sampler.on_answer = partial(observer.playing, number, len(samplers))
        try:
            with observer.interruptible():
                make_sources[number](keeper).score(0)
        finally:
            sampler.on_answer = None
        played = plays[weights] = keeper.played
        first = next(iter(plays.values()))
        compared = None if played is first else first
        summaries.append(summarize(weights, played, config.num_samples, compared))
        observer.step_done(number + 1, len(samplers), _reported(summaries))
    scores = {weights: played.scores for weights, played in plays.items()}
    rows = [summary.to_row(scores[summary.weights].metrics) for summary in summaries]
    write_lines(folder / METRICS, rows)
    answers = side_by_side(plays)
    write_lines(folder / ANSWERS, answers)
    write_json(
        folder / "rewards.json", {weights: asdict(found) for weights, found in scores.items()}
    )
    settings = {name: str(value) for name, value in asdict(config).items()}
    write_json(folder / _CONFIG_FILE, {"recipe": "evaluate", **settings})
    title = f"evaluate {config.environment or config.data}"
    draw(folder, title, summaries)
    show(title, summaries, answers, folder)
    return summaries


def _reported(summaries: Sequence[Summary]) -> dict[str, float]:
    """Return the figures of the last that played, and of several the reward of each so far."""
    rewards = {f"reward/{each.weights}": each.reward for each in summaries}
    found = (rewards if len(rewards) > 1 else {}) | summaries[-1].figures
    # A report with more is refused as a whole; reasons of ending are the last.
    return dict(list(found.items())[:_MOST_REPORTED])


def _open(config: Config, client: Client) -> dict[str, Sampler]:
    """Return the samplers of all that play, by their short names."""
    samplers: dict[str, Sampler] = {}
    opened: set[tuple[str, str]] = set()
    for kind in ("base_model", "checkpoint", "run"):
        for name in filter(None, map(str.strip, getattr(config, kind).split(","))):
            if (kind, name) in opened:
                continue
            opened.add((kind, name))
            # Checkpoints of two projects may have one short name, and a run that of a model.
            labels = (shorten(name), name, f"{kind} {name}")
            label = next(each for each in labels if each not in samplers)
            samplers[label] = client.create_sampler(**{kind: name})
    if not samplers:
        raise ConfigurationError(
            "an evaluation needs one source of weights, or several",
            remedy="give base_model=, checkpoint= or run=, with commas between several",
        )
    return samplers


def _prepare(config: Config, client: Client, sampler: Sampler) -> Callable[[RolloutKeeper], Source]:
    """Read what is played, and return what makes a source of it."""
    served = {model.base_model: model for model in client.list_models()}
    settings = SourceConfig(
        num_tasks=1,
        group_size=1,
        temperature=0.0,
        max_tokens=config.max_tokens,
        num_validation=config.num_validation,
        num_samples=config.num_samples,
        validation_temperature=config.temperature,
        seed=config.seed,
        max_turns=config.max_turns,
        max_episode_tokens=config.max_episode_tokens,
        history=config.history,
    )
    model = served[sampler.base_model]
    if config.reward or config.judge:
        code = RewardedData(config, client)
        return lambda keeper: code.source(settings, sampler, sampler.get_tokenizer(), model, keeper)
    if config.environment:
        plan = plan_environments(config, client, max_context_tokens=model.max_context_tokens)
        return lambda keeper: NamedSource(settings, sampler, client, plan, keeper)
    problems = load_problems(config.data)
    tokenizer = sampler.get_tokenizer()
    return lambda keeper: ProblemSource(settings, sampler, tokenizer, problems, config.data, keeper)


def _folder(config: Config) -> Path:
    """Return the folder of the results, made."""
    folder = config.output_dir
    if folder is None:
        stem = f"evaluate-{slug(config)}"
        number = 1
        while (_ROOT / f"{stem}-{number}").exists():
            number += 1
        folder = _ROOT / f"{stem}-{number}"
    elif (folder / METRICS).exists() and not config.overwrite:
        raise ConfigurationError(
            f"{folder} holds results already",
            remedy="choose another folder with output_dir=..., or replace them with --overwrite",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {folder} cannot be written: {error.strerror}",
            remedy="choose another folder with output_dir=...",
        ) from error
    return folder
