"""Evaluation: base models, checkpoints and runs play what they are not trained on.

It is the play of training and validation without a gradient: the same runner, the same seeds, the
same tokens. The mean has a 95 % interval, by the normal approximation over tasks. Of several, each
is compared with the first one, paired by task, and their answers are written side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table

from tinsmith.client import Client
from tinsmith.environments.local import STEP_TIMEOUT_S
from tinsmith.errors import ConfigurationError
from tinsmith.names import shorten
from tinsmith.recipes.experience import Scores, Source, SourceConfig
from tinsmith.recipes.experiment.experiment import remove_rollouts, slug, slugify
from tinsmith.recipes.experiment.json_files import write_json, write_lines
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.rules import check_settings
from tinsmith.recipes.experiment.run_log import METRICS
from tinsmith.recipes.kept_rollouts import RolloutKeeper
from tinsmith.recipes.named_source import NamedSource, plan_environments
from tinsmith.recipes.policy_gradient import mean_of, paired_lower_95
from tinsmith.recipes.problem_source import ProblemSource
from tinsmith.recipes.rewarded_source import RewardedData
from tinsmith.recipes.tasks.rl_problems import load_problems
from tinsmith.rollouts.records import EpisodeRecord
from tinsmith.sampling.sampler import Sampler

__all__ = ["Config", "Summary", "main"]

_ROOT = Path("runs")
_CONFIG_FILE = "config.json"
_NUM_SHOWN = 3
ANSWERS = "answers.jsonl"
"""File with a row for each task: what was asked, and what was said to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Settings of the recipe."""

    base_model: str = ""
    """Name of a base model that plays; of this, `checkpoint` and `run` at least one is given, and
    each may be several with commas. The first is what others are compared with."""
    checkpoint: str = ""
    """A checkpoint that plays, `run-1/final`."""
    run: str = ""
    """Name or id of a run whose newest weights play."""
    data: str = "arithmetic"
    """`arithmetic`, `small_sums`, or a JSONL file in GSM8K's layout, of which the held-out part is
    scored."""
    environment: str = ""
    """What is played instead of `data`: a served name such as `guessing`, a class of your own,
    `FILE.py:CLASS` or `MODULE:CLASS`, or `grpc://HOST:PORT[/NAME]` of a `tinsmith env serve`."""
    environment_config: str = ""
    """Settings of the environment, as a JSON object."""
    reward: str = ""
    """A function of your own, `FILE.py:score`, called with a row of `data` and the answer."""
    step_timeout_s: float = STEP_TIMEOUT_S
    """What a step of your own environment, or a call of your own reward, may take."""
    rollouts: str = "client"
    """Where episodes are played: in the `client`, or of a served name on the `server`."""
    num_validation: int = 256
    """Tasks that are played, at most."""
    max_tokens: int = 4
    """Sampled tokens of a turn."""
    max_turns: int = 16
    """Turns of an episode, at most."""
    max_episode_tokens: int = 4096
    """Sampled tokens of all turns of an episode, at most."""
    history: str = "refuse"
    """What becomes of an episode whose chat template rewrites its history, as templates that drop
    earlier thoughts do: `refuse`, `split` into a sample for each turn, or `append` as sampled."""
    keep_rollouts: str = ""
    """Whether every rollout is written below `output_dir`: `jsonl`, `parquet`; empty keeps none."""
    output_dir: Path | None = None
    """`runs/evaluate-<data>-<n>` if it is left out."""
    overwrite: bool = False
    """Whether results that `output_dir` holds are replaced."""

    def __post_init__(self) -> None:
        # The name of a checkpoint that exists is no id for a new one.
        check_settings(self, without=("checkpoint",))


@dataclass(frozen=True, slots=True)
class Summary:
    """What came out for one of those that played.

    Attributes:
        weights: What played, by its short name.
        reward: Mean over tasks.
        reward_low: Lower end of its 95 % interval.
        reward_high: Upper end.
        num_tasks: Tasks that were scored.
        is_success: Share of the tasks that were solved; None where they do not say.
        num_pairs: Tasks that the first one played as well; None for the first, as is what follows.
        gain: Mean of what it earned above the first one, task by task.
        gain_low: Lower end of its 95 % interval.
        gain_high: Upper end.
    """

    weights: str
    reward: float
    reward_low: float
    reward_high: float
    num_tasks: int
    is_success: float | None
    num_pairs: int | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None


_Plays = Mapping[str, EpisodeRecord]
"""Episodes by the names of their tasks."""


class _Remembering(RolloutKeeper):
    """Keeps rollouts in memory too."""

    def __init__(self, folder: Path, layout: str, weights: Sampler, agent: str) -> None:
        super().__init__(folder, layout, weights, agent)
        self.records: list[EpisodeRecord] = []

    def keep(self, phase: str, num_done: int, records: Iterable[EpisodeRecord]) -> None:
        """Note the records, and write them if that is asked for."""
        noted = list(records)
        self.records += noted
        super().keep(phase, num_done, noted)


def main(config: Config, client: Client, observer: Observer | None = None) -> list[Summary]:
    """Play, write `metrics.jsonl` and `answers.jsonl`, and show a table.

    Raises:
        ConfigurationError: If no source of weights is given, or if the environment is not there,
            the data cannot be read or the folder is taken.
    """
    del observer
    samplers = _open(config, client)
    make_sources = [_prepare(config, client, sampler) for sampler in samplers.values()]
    folder = _folder(config)
    remove_rollouts(folder)
    scores: dict[str, Scores] = {}
    plays: dict[str, _Plays] = {}
    for number, (weights, sampler) in enumerate(samplers.items()):
        agent = f"{number}-{slugify(weights)}" if len(samplers) > 1 else ""
        keeper = _Remembering(folder, config.keep_rollouts, sampler, agent)
        [scores[weights]] = make_sources[number](keeper).score(0)
        plays[weights] = {_task_of(record): record for record in keeper.records}
    first = next(iter(plays.values()))
    summaries = [
        _summarize(weights, scores[weights], played, None if played is first else first)
        for weights, played in plays.items()
    ]
    rows = [
        {"step": 0, **scores[summary.weights].metrics, **asdict(summary)} for summary in summaries
    ]
    write_lines(folder / METRICS, rows)
    answers = _side_by_side(plays)
    write_lines(folder / ANSWERS, answers)
    write_json(
        folder / "rewards.json", {weights: asdict(found) for weights, found in scores.items()}
    )
    settings = {name: str(value) for name, value in asdict(config).items()}
    write_json(folder / _CONFIG_FILE, {"recipe": "evaluate", **settings})
    _show(config, summaries, answers, folder)
    return summaries


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
        seed=0,
        max_turns=config.max_turns,
        max_episode_tokens=config.max_episode_tokens,
        history=config.history,
    )
    model = served[sampler.base_model]
    if config.reward:
        code = RewardedData(config)
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


def _task_of(record: EpisodeRecord) -> str:
    """Return what names the task of an episode for all that play it."""
    seed = record.origin.environment_seed
    return record.episode if seed is None else f"seed {seed}"


def _summarize(weights: str, scores: Scores, played: _Plays, first: _Plays | None) -> Summary:
    rewards = scores.rewards
    low, high = _interval([0.0] * len(rewards), rewards)
    summary = Summary(
        weights=weights,
        reward=mean_of(rewards),
        reward_low=low,
        reward_high=high,
        num_tasks=len(rewards),
        is_success=mean_of([float(each) for each in scores.successes])
        if scores.successes
        else None,
    )
    if first is None:
        return summary
    # An episode that failed was played by one of them alone.
    common = [task for task in first if task in played]
    before, after = ([each[task].reward for task in common] for each in (first, played))
    low, high = _interval(before, after)
    return replace(
        summary,
        num_pairs=len(common),
        gain=mean_of(after) - mean_of(before),
        gain_low=low,
        gain_high=high,
    )


def _interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the mean gain; twice the mean if there is none."""
    mean = mean_of(after) - mean_of(before)
    low = paired_lower_95(before, after)
    return (low, 2 * mean - low) if math.isfinite(low) else (mean, mean)


def _side_by_side(plays: Mapping[str, _Plays]) -> list[dict[str, Any]]:
    """Return a row for each task: what was asked, and what each of those that played it said."""
    tasks = dict.fromkeys(task for played in plays.values() for task in played)
    rows = []
    for task in tasks:
        episodes = {weights: each[task] for weights, each in plays.items() if task in each}
        answers = {
            weights: {"answer": _texts(episode, mask=1), "reward": episode.reward}
            for weights, episode in episodes.items()
        }
        prompt = _texts(next(iter(episodes.values())), mask=0)
        rows.append({"prompt": prompt, "answers": answers})
    return rows


def _texts(record: EpisodeRecord, *, mask: int) -> str:
    columns = zip(record.texts, record.mask, strict=True)
    return "".join(text for text, is_sampled in columns if is_sampled == mask)


def _show(
    config: Config, summaries: Sequence[Summary], answers: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    table = rich.table.Table(
        title=f"evaluate {config.environment or config.data}", box=rich.box.SIMPLE
    )
    table.add_column("weights", overflow="fold")
    for name in ("tasks", "reward, 95 %", "solved"):
        table.add_column(name)
    if len(summaries) > 1:
        table.add_column(f"above {summaries[0].weights}, 95 %")
    for each in summaries:
        cells = [
            each.weights,
            str(each.num_tasks),
            f"{each.reward:.3f} ± {each.reward - each.reward_low:.3f}",
            "" if each.is_success is None else f"{each.is_success:.1%}",
        ]
        if each.gain is not None and each.gain_low is not None:
            cells.append(f"{each.gain:+.3f} ± {each.gain - each.gain_low:.3f}")
        table.add_row(*cells)
    console = rich.console.Console()
    console.print(table)
    for row in _telling(answers):
        console.print(f"{row['prompt']!r}", highlight=False, markup=False)
        for weights, said in row["answers"].items():
            text = f"  {said['reward']:g}  {weights}: {said['answer']!r}"
            console.print(text, highlight=False, markup=False)
    console.print(f"written to {folder}", highlight=False, markup=False, soft_wrap=True)


def _telling(answers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a few tasks, those first that not all earned the same on."""
    return sorted(
        answers, key=lambda row: len({said["reward"] for said in row["answers"].values()}) < 2
    )[:_NUM_SHOWN]
