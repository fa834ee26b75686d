"""`tinsmith rollouts`: what a model played, from files that recipes and clients left."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.masked_text import masked_lines
from tinsmith.cli.output import AsJson, show_json, show_list, show_record
from tinsmith.errors import ConfigurationError
from tinsmith.rollouts.records import EpisodeRecord, Replay, read_records
from tinsmith.rollouts.records.replaying import version_range

DIFFERENT = 3
"""Exit code of a replay whose tokens differ."""

app = typer.Typer(help="List, show and replay rollouts that were kept.", no_args_is_help=True)

_File = Annotated[Path, typer.Argument(help="A .jsonl or .parquet file, or a folder of them.")]
_Index = Annotated[int, typer.Argument(help="Which episode, from 0, as `list` counts them.")]

_COLUMNS = {
    "index": "INDEX",
    "environment": "ENVIRONMENT",
    "phase": "PHASE",
    "step": "STEP",
    "agent": "AGENT",
    "seed": "SEED",
    "reward": "REWARD",
    "turns": "TURNS",
    "sampled": "SAMPLED",
    "tokens": "TOKENS",
    "ended": "ENDED",
    "is_used": "USED",
}


@dataclass(frozen=True, slots=True)
class _Row:
    """One episode in a list."""

    index: int
    episode: str
    environment: str
    phase: str
    step: int | None
    agent: str
    seed: int | None
    reward: float
    advantage: float | None
    turns: int
    sampled: int
    tokens: int
    images: int
    ended: str
    is_used: bool

    @classmethod
    def of(cls, index: int, record: EpisodeRecord) -> _Row:
        """Return the row of a record."""
        origin = record.origin
        return cls(
            index=index,
            episode=record.episode,
            environment=origin.environment,
            phase=origin.phase,
            step=origin.step,
            agent=origin.agent,
            seed=origin.environment_seed,
            reward=record.reward,
            advantage=record.advantage,
            turns=len(record.turns),
            sampled=record.num_sampled_tokens,
            tokens=len(record.tokens),
            images=len(record.images),
            ended=record.reason,
            is_used=record.is_used,
        )


@app.command("list")
def list_rollouts(
    file: _File,
    as_json: AsJson = False,
) -> None:
    """List episodes with reward, length and the reason of their end."""
    rows = [_Row.of(index, record) for index, record in enumerate(read_records(file))]
    show_list(rows, _COLUMNS, as_json=as_json)


@app.command("show")
def show_rollout(
    file: _File,
    index: _Index = 0,
    as_json: AsJson = False,
) -> None:
    """Show an episode; what the model said is coloured, or in brackets where colours are not."""
    record = _find(file, index)
    if as_json:
        show_json(record.to_row())
        return
    show_record(_Row.of(index, record))
    origin = record.origin
    weights = origin.checkpoint or origin.run or origin.base_model
    print(f"weights: {weights}, {_versions(version_range(record.versions, record.mask))}")
    if record.failure:
        print(f"failure: {record.failure}")
    print(f"rewards: {' '.join(f'{reward:g}' for reward in record.rewards)}")
    print()
    for line in masked_lines(record, coloured=sys.stdout.isatty()):
        print(line)


@app.command("replay")
def replay_rollout(
    file: _File,
    index: _Index,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint that plays instead.")] = "",
    run: Annotated[str, typer.Option(help="Run whose newest weights play instead.")] = "",
    base_model: Annotated[str, typer.Option(help="Base model that plays instead.")] = "",
    environment: Annotated[
        str, typer.Option(help="What plays instead of the environment that the record names.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Play an episode again by its seed, and say whether its tokens are the same.

    Exit codes: 0, all tokens are the same; 3, they differ; 1, it could not be played.
    """
    record = _find(file, index)
    source = {"checkpoint": checkpoint, "run": run, "base_model": base_model}
    if not any(source.values()):
        origin = record.origin
        is_trained = origin.checkpoint or origin.run
        source = {
            "checkpoint": origin.checkpoint,
            "run": origin.run,
            "base_model": "" if is_trained else origin.base_model,
        }
    with connect("tinsmith rollouts replay") as client:
        sampler = client.create_sampler(**source)
        replay = client.environments.replay(
            record, sampler=sampler, environment=environment or None
        )
        models = {model.base_model: model.exactness for model in client.list_models()}
    if as_json:
        same = {"is_same": replay.is_same, "is_bit_equal": replay.is_bit_equal}
        show_json({"episode": record.episode, **dataclasses.asdict(replay), **same})
    else:
        for line in describe_replay(record, replay, models.get(sampler.base_model, "")):
            print(line)
    if not replay.is_same:
        raise typer.Exit(DIFFERENT)


def describe_replay(record: EpisodeRecord, replay: Replay, exactness: str) -> list[str]:
    """Return what came of a replay, in sentences."""
    first = replay.first_difference
    if replay.is_bit_equal:
        return [f"same: {replay.num_tokens} tokens, and the bits of their log-probabilities"]
    if first is None:
        return [
            f"same: {replay.num_tokens} tokens; {replay.num_logprobs} log-probabilities differ, "
            f"by at most {replay.max_gap:.3g}"
        ]
    lines = [
        f"different from token {first} of {replay.num_tokens} on: "
        f"{_token(replay.recorded)} in the record, {_token(replay.replayed)} now"
    ]
    if not any(record.mask[: first + 1]) or not record.mask[min(first, len(record.mask) - 1)]:
        lines.append("the environment showed something else there: it does not keep to its seed")
    if replay.versions != replay.replayed_versions:
        lines.append(
            f"weights differ: {_versions(replay.versions)} in the record, "
            f"{_versions(replay.replayed_versions)} now; give --checkpoint of the same version"
        )
    if exactness and exactness != "exact":
        lines.append(f"bits are {exactness} on this server, so that a draw may fall otherwise")
    return lines


def _find(file: Path, index: int) -> EpisodeRecord:
    """Return an episode of a file.

    Raises:
        ConfigurationError: If there are fewer.
    """
    if index >= 0:
        record = next(itertools.islice(read_records(file), index, None), None)
        if record is not None:
            return record
    raise ConfigurationError(
        f"there is no episode {index} in {file}",
        remedy="tinsmith rollouts list shows those that there are",
    )


def _token(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"


def _versions(versions: tuple[int, int] | None) -> str:
    if versions is None:
        return "no version"
    first, last = versions
    return f"version {first}" if first == last else f"versions {first} to {last}"
