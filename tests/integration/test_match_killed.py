"""A match whose coordinator and trainer are killed in between has the bits of a calm one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.integration.servers import pods
from tests.integration.test_recipes import weights_sha256

from tinsmith.matches import Member
from tinsmith.recipes import match
from tinsmith.recipes.experiment.run_log import RunLog, read_metrics
from tinsmith.rollouts.records import read_records

CONFIG = match.Config(
    data="kuhn",
    adapter="full",
    imitation_learning_rate=3e-3,
    learning_rate=3e-4,
    num_imitation_steps=14,
    num_steps=17,
    num_games=6,
    num_validation=2,
    max_tokens=4,
    keep_rollouts="jsonl",
)
KILLED_AT_MOVES = (3, 14)
"""The coordinator is killed when so many moves were sent, in the middle of games."""
KILLED_AT_STEPS = (4, 15)
"""The trainer is killed when so many steps are done: in the warm start, and between games."""


def what_happened(folder: Path) -> list[Any]:
    """Return rewards, order and tokens of a match, as its files have them."""
    rows = [
        {name: value for name, value in row.items() if name != "time_s"}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
    episodes = [
        (path.relative_to(folder), record.tokens, record.advantage, record.origin.environment_seed)
        for path in sorted(folder.rglob("*.jsonl"))
        if "rollouts" in str(path.relative_to(folder))
        for record in read_records(path)
    ]
    assert episodes
    return [*rows, *episodes]


def test_a_killed_match_has_the_bits_of_an_undisturbed_one(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = pods(tmp_path / "pods", model_dir, "gateway", "coordinator")
    with running as (deployment, processes), deployment.client() as client:
        calm = match.main(dataclasses.replace(CONFIG, output_dir=tmp_path / "calm"), client)

        take_turn, add = Member.take_turn_async, RunLog.add
        num_moves = 0
        killed: list[str] = []

        def kill(pod: str) -> None:
            processes[pod].kill()
            processes[pod].start()
            killed.append(pod)

        async def take_turn_or_kill(member: Member, *args: Any, **options: Any) -> Any:
            nonlocal num_moves
            num_moves += 1
            if num_moves in KILLED_AT_MOVES:
                kill("coordinator")
            return await take_turn(member, *args, **options)

        def add_and_kill(log: RunLog, step: int, metrics: dict[str, float]) -> None:
            add(log, step, metrics)
            if step in KILLED_AT_STEPS:
                kill("trainer")

        monkeypatch.setattr(Member, "take_turn_async", take_turn_or_kill)
        monkeypatch.setattr(RunLog, "add", add_and_kill)
        disturbed = match.main(dataclasses.replace(CONFIG, output_dir=tmp_path / "killed"), client)

        assert killed.count("coordinator") == len(KILLED_AT_MOVES)
        assert killed.count("trainer") == len(KILLED_AT_STEPS)
        assert what_happened(tmp_path / "killed") == what_happened(tmp_path / "calm")
        for one, other in zip(calm, disturbed, strict=True):
            assert weights_sha256(client, one.checkpoint) == weights_sha256(
                client, other.checkpoint
            )
