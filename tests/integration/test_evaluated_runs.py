"""Evaluators on the way of a training: figures in its metrics, and failures that end nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.servers import Deployment

import tinsmith
from tinsmith.recipes import match, rl, supervised
from tinsmith.recipes.experiment.observer import Observer

CODE = """
import tinsmith

VERSIONS = []

def tokens(sampler):
    params = tinsmith.SamplingParams(max_tokens=3, seed=1)
    [answer] = sampler.sample([5, 6], sampling_params=params).result().sequences
    VERSIONS.append(max(answer.versions))
    return {"number": len(answer.tokens), "version": max(answer.versions)}

def broken(sampler):
    raise RuntimeError("no data")
"""


@pytest.fixture(scope="module")
def client(embedded: Deployment) -> Iterator[tinsmith.Client]:
    with embedded.client() as client:
        yield client


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "my_evaluators.py").write_text(CODE)
    return str(tmp_path / "my_evaluators.py")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def versions_by_step(rows: list[dict[str, Any]], name: str) -> dict[int, float]:
    key = f"{name}/version"
    return {int(row["step"]) + 1: row[key] for row in rows if key in row}


def test_rl_scores_the_live_weights_on_the_way(
    client: tinsmith.Client, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rl.Config(
        data="small_sums",
        num_imitation_steps=4,
        num_demonstrations=4,
        num_steps=4,
        num_validation=2,
        rank=2,
        evaluators=f"{code}:tokens",
        eval_every=2,
        rare_evaluators=f"{code}:broken",
        rare_eval_every=3,
        output_dir=tmp_path / "out",
    )
    summary = rl.main(config, client)
    # Each call saw the weights of its step, and the one that failed lost nothing.
    rows = rows_of(tmp_path / "out")
    assert versions_by_step(rows, "evaluator/tokens") == {2: 2.0, 4: 4.0}
    assert all("validation" in rows[step] for step in (1, 3))
    assert summary.checkpoint
    said = capsys.readouterr().out
    assert "evaluator broken failed after step 3: RuntimeError: no data" in said
    assert "evaluator broken failed after step 4: RuntimeError: no data" in said


def test_supervised_scores_the_live_weights_on_the_way(
    client: tinsmith.Client, code: str, tmp_path: Path
) -> None:
    rows = [{"prompt": f"say {number}", "completion": str(number)} for number in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = supervised.Config(
        data=str(tmp_path / "data.jsonl"),
        max_tokens=2,
        num_steps=5,
        batch_size=2,
        rank=2,
        evaluators=f"{code}:tokens",
        eval_every=4,
        rare_evaluators=f"{code}:broken",
        rare_eval_every=2,
        output_dir=tmp_path / "out",
    )
    summary = supervised.main(config, client)
    found = rows_of(tmp_path / "out")
    assert [row["step"] for row in found] == [0, 1, 2, 3, 4]
    assert versions_by_step(found, "evaluator/tokens") == {4: 4.0, 5: 5.0}
    assert len(summary.losses) == 5

    class Blind(Observer):
        has_sampler = False

    with pytest.raises(tinsmith.ConfigurationError, match="evaluators sample"):
        supervised.main(config, client, Blind())


def test_each_policy_of_a_match_is_evaluated(
    client: tinsmith.Client, code: str, tmp_path: Path
) -> None:
    config = match.Config(
        num_imitation_steps=1,
        num_steps=1,
        num_games=2,
        num_validation=2,
        rank=2,
        rare_evaluators=f"{code}:tokens",
        output_dir=tmp_path / "out",
    )
    match.main(config, client)
    [row] = rows_of(tmp_path / "out")
    for agent in ("black", "white"):
        assert row[f"{agent}/evaluator/tokens/version"] == 1.0
