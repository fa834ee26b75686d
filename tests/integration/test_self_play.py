"""Self-play end to end: it imitates, plays itself and its past, and resumes with the same bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.integration.servers import Deployment
from tests.integration.test_recipes import weights_sha256

import tinsmith
from tinsmith.recipes import self_play
from tinsmith.recipes.experiment.run_log import RunLog, read_metrics

CONFIG = self_play.Config(
    data="kuhn",
    opponent="league",
    adapter="full",
    imitation_learning_rate=3e-3,
    learning_rate=3e-4,
    num_imitation_steps=30,
    num_steps=36,
    num_games=16,
    snapshot_every=2,
    max_snapshots=2,
    num_validation=24,
    save_every=33,
    max_tokens=4,
)


def test_a_league_run_that_is_interrupted_goes_on_with_the_same_bits(
    embedded: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = RunLog.add

    def interrupt_after(log: RunLog, step: int, metrics: dict[str, float]) -> None:
        add(log, step, metrics)
        if step == 32:
            raise KeyboardInterrupt

    with embedded.client() as client:
        calm = self_play.main(dataclasses.replace(CONFIG, output_dir=tmp_path / "a"), client)
        config = dataclasses.replace(CONFIG, output_dir=tmp_path / "b")
        with monkeypatch.context() as patch:
            patch.setattr(RunLog, "add", interrupt_after)
            with pytest.raises(KeyboardInterrupt):
                self_play.main(config, client)
        resumed = self_play.main(config, client)
        assert weights_sha256(client, resumed.checkpoint) == weights_sha256(client, calm.checkpoint)

    rows = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert rows[29]["imitation_loss"] < rows[0]["imitation_loss"] / 5
    assert all(row["mismatch"] == 0.0 for row in rows[30:])
    without_time = [
        [{key: value for key, value in row.items() if key != "time_s"} for row in part]
        for part in (rows, read_metrics(tmp_path / "b" / "metrics.jsonl"))
    ]
    assert without_time[0] == without_time[1]
    kept = json.loads((tmp_path / "a" / "opponents.json").read_text())[-1]
    names = [player["name"] for player in kept["league"]["players"]]
    assert names[-1] == "opponent-36"
    assert len(names) == CONFIG.max_snapshots
    assert set(kept["baselines"]) == {"first", "second"}
    assert calm.num_validation == CONFIG.num_validation


def test_gomoku_is_played_against_a_script(embedded: Deployment, tmp_path: Path) -> None:
    config = self_play.Config(
        opponent="greedy",
        teacher="greedy",
        num_imitation_steps=1,
        num_steps=2,
        num_games=4,
        num_validation=2,
        eval_every=2,
        output_dir=tmp_path,
    )
    with embedded.client() as client:
        summary = self_play.main(config, client)
    # A model that knows nothing names no legal move, and that loses.
    assert summary.before == summary.after == -1.0
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert "imitation_loss" in rows[0]
    assert "reward" not in rows[0]
    assert rows[1]["validation"] == rows[1]["reward"] == -1.0
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data": "chess"}, "there is no game 'chess'"),
        ({"board_size": 1}, "size is 1; a board has 2 to 19 rows"),
        ({"row_length": 9}, "row_length is 9"),
        ({"teacher": "honest"}, "teacher is 'honest', which gomoku has no script for"),
        ({"opponent": "nobody"}, "opponent is 'nobody'"),
        ({"validation_opponent": ""}, "validation_opponent is ''"),
        ({"num_steps": 5, "num_imitation_steps": 6}, "num_imitation_steps is 6, more than"),
        ({"data": "kuhn", "opponent": "greedy"}, "opponent is 'greedy', which kuhn has no"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_run_begins(
    embedded: Deployment, tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    config = dataclasses.replace(self_play.Config(output_dir=tmp_path / "new"), **changes)
    with embedded.client() as client:
        num_runs = len(client.runs.list())
        with pytest.raises(tinsmith.ConfigurationError, match=problem):
            self_play.main(config, client)
        assert len(client.runs.list()) == num_runs
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("league_share", 1.5),
        ("snapshot_every", 0),
        ("max_snapshots", 0),
        ("num_games", 0),
        ("num_imitation_steps", -1),
        ("imitation_learning_rate", 0.0),
        ("baseline_decay", 1.0),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(tinsmith.ConfigurationError, match=f"{name} is"):
        self_play.Config(**{name: value})  # type: ignore[arg-type]
