"""Evaluation: a base model, a checkpoint or a run plays what it is not trained on.

It is the play of training and validation without a gradient: the same runner, the same seeds, the
same tokens. The mean has a 95 % interval, by the normal approximation over tasks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import rich.console
import rich.table

from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.experience import Scores, Source, SourceConfig
from tinsmith.recipes.experiment.experiment import remove_rollouts, slug
from tinsmith.recipes.experiment.json_files import write_json
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.rules import check_settings
from tinsmith.recipes.experiment.run_log import METRICS
from tinsmith.recipes.kept_rollouts import RolloutKeeper
from tinsmith.recipes.own_source import OwnCode
from tinsmith.recipes.policy_gradient import mean_of, paired_lower_95
from tinsmith.recipes.problem_source import ProblemSource
from tinsmith.recipes.served_source import (
    EnvironmentPlan,
    ServedSource,
    check_served,
    read_settings,
)
from tinsmith.recipes.tasks.rl_problems import load_problems
from tinsmith.sampling.sampler import Sampler

__all__ = ["Config", "Summary", "main"]

_ROOT = Path("runs")
_CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Settings of the recipe."""

    base_model: str = ""
    """Name of a base model that plays; one of `base_model`, `checkpoint` and `run` is given."""
    checkpoint: str = ""
    """Resource name of a checkpoint that plays."""
    run: str = ""
    """Name or id of a run whose newest weights play."""
    data: str = "arithmetic"
    """`arithmetic`, or a JSONL file in GSM8K's layout, of which the held-out part is scored."""
    environment: str = ""
    """Name of a served environment, such as `guessing`, or a class of your own,
    `FILE.py:CLASS`, to play instead of `data`."""
    environment_config: str = ""
    """Settings of the environment, as a JSON object."""
    reward: str = ""
    """A function of your own, `FILE.py:score`, called with a row of `data` and the answer."""
    rollouts: str = "client"
    """Where episodes of an environment are played: in the `client`, or on the `server`."""
    num_validation: int = 256
    """Tasks that are played, at most."""
    max_tokens: int = 4
    """Sampled tokens of a turn."""
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
    """What came out.

    Attributes:
        reward: Mean over tasks.
        reward_low: Lower end of its 95 % interval.
        reward_high: Upper end.
        num_tasks: Tasks that were scored.
        is_success: Share of the tasks that were solved; None where they do not say.
    """

    reward: float
    reward_low: float
    reward_high: float
    num_tasks: int
    is_success: float | None


def main(config: Config, client: Client, observer: Observer | None = None) -> Summary:
    """Play, write `metrics.jsonl` and show a table.

    Raises:
        ConfigurationError: Unless one source of weights is given, or if the environment is not
            served, the data cannot be read or the folder is taken.
    """
    del observer
    sampler = client.create_sampler(
        base_model=config.base_model, checkpoint=config.checkpoint, run=config.run
    )
    make_source = _prepare(config, client, sampler)
    folder = _folder(config)
    remove_rollouts(folder)
    [scores] = make_source(RolloutKeeper(folder, config.keep_rollouts, sampler)).score(0)
    summary = _summarize(scores)
    with (folder / METRICS).open("w", encoding="utf-8") as file:
        row: dict[str, object] = {"step": 0, **scores.metrics, **asdict(summary)}
        file.write(json.dumps(row) + "\n")
    write_json(folder / "rewards.json", asdict(scores))
    settings = {name: str(value) for name, value in asdict(config).items()}
    write_json(folder / _CONFIG_FILE, {"recipe": "evaluate", **settings})
    _show(config, sampler, summary, folder)
    return summary


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
    )
    if OwnCode.is_named(config):
        code, model = OwnCode(config), served[sampler.base_model]
        return lambda keeper: code.source(settings, sampler, sampler.get_tokenizer(), model, keeper)
    if not config.environment:
        problems = load_problems(config.data)
        tokenizer = sampler.get_tokenizer()
        return lambda keeper: ProblemSource(
            settings, sampler, tokenizer, problems, config.data, keeper
        )
    check_served(client, config.environment)
    own = read_settings(config.environment_config, "environment_config")
    plan = EnvironmentPlan(
        environment=config.environment,
        settings=own,
        validation_environment=config.environment,
        validation_settings=own,
        max_context_tokens=served[sampler.base_model].max_context_tokens,
        rollouts="server" if config.rollouts == "server" else "client",
    )
    return lambda keeper: ServedSource(settings, sampler, client, plan, keeper)


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


def _summarize(scores: Scores) -> Summary:
    rewards = scores.rewards
    mean = mean_of(rewards)
    low = paired_lower_95([0.0] * len(rewards), rewards)
    is_known = bool(rewards) and math.isfinite(low)
    return Summary(
        reward=mean,
        reward_low=low if is_known else mean,
        reward_high=2 * mean - low if is_known else mean,
        num_tasks=len(rewards),
        is_success=mean_of([float(each) for each in scores.successes])
        if scores.successes
        else None,
    )


def _show(config: Config, sampler: Sampler, summary: Summary, folder: Path) -> None:
    table = rich.table.Table(title=f"evaluate {config.environment or config.data}")
    cells: Mapping[str, str] = {
        "weights": config.checkpoint or config.run or sampler.base_model,
        "tasks": str(summary.num_tasks),
        "reward": f"{summary.reward:.4f}",
        "95 %": f"{summary.reward_low:.4f} to {summary.reward_high:.4f}",
        "solved": "" if summary.is_success is None else f"{summary.is_success:.1%}",
    }
    for name in cells:
        table.add_column(name)
    table.add_row(*cells.values())
    console = rich.console.Console()
    console.print(table)
    console.print(f"written to {folder}", highlight=False, markup=False, soft_wrap=True)
