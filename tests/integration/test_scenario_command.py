"""Scenarios against a real server, a few steps each, and two policies that resume together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.integration.servers import BASE_MODEL, Deployment
from tests.integration.test_recipes import weights_sha256

import tinsmith
from tinsmith.recipes import two_policies
from tinsmith.recipes.experiment.run_log import RunLog, read_metrics
from tinsmith.recipes.scenarios.table import configure

SHORT = ("num_imitation_steps=2", "num_steps=4", "num_validation=4", "eval_every=1")
TWO = two_policies.Config(
    data="kuhn",
    adapter="full",
    imitation_learning_rate=3e-3,
    learning_rate=3e-4,
    num_imitation_steps=10,
    num_steps=14,
    num_games=8,
    num_validation=8,
    save_every=11,
    max_tokens=4,
)


@pytest.mark.parametrize("name", ["math", "math_lora"])
def test_sums_are_imitated_then_played_and_the_gain_begins_behind_the_warm_start(
    embedded: Deployment, tmp_path: Path, name: str
) -> None:
    words = [f"name={name}", *SHORT, "num_problems=4", "num_demonstrations=8"]
    module, config = configure([*words, f"base_model={BASE_MODEL}", f"output_dir={tmp_path}"])
    with embedded.client() as client:
        summary = module.main(config, client)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert ["imitation_loss" in row for row in rows] == [True, True, False, False]
    for row in rows:
        assert {"validation", "validation_is_success"} <= row.keys()
    for row in rows[2:]:
        assert {"reward", "is_success", "is_formatted"} <= row.keys()
        # A random model's answers have no form, mostly, and that costs a tenth.
        assert -config.format_coef <= row["reward"] <= 1.0
    warm, after = (
        json.loads((tmp_path / f"{part}.json").read_text())[0]["rewards"]
        for part in ("warm_start", "after")
    )
    assert summary.warm_start == pytest.approx(sum(warm) / len(warm))
    assert summary.after == pytest.approx(sum(after) / len(after))


def test_two_policies_that_are_interrupted_go_on_with_the_same_bits(
    embedded: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = RunLog.add

    def interrupt_after(log: RunLog, step: int, metrics: dict[str, float]) -> None:
        add(log, step, metrics)
        if step == 12:
            raise KeyboardInterrupt

    with embedded.client() as client:
        calm = two_policies.main(dataclasses.replace(TWO, output_dir=tmp_path / "a"), client)
        config = dataclasses.replace(TWO, output_dir=tmp_path / "b")
        with monkeypatch.context() as patch:
            patch.setattr(RunLog, "add", interrupt_after)
            with pytest.raises(KeyboardInterrupt):
                two_policies.main(config, client)
        resumed = two_policies.main(config, client)
        assert [weights_sha256(client, each.checkpoint) for each in resumed] == [
            weights_sha256(client, each.checkpoint) for each in calm
        ]
        assert two_policies.main(config, client) == resumed

    assert len({each.run for each in calm}) == 2
    rows = read_metrics(tmp_path / "a" / "metrics.jsonl")
    for row in rows[: TWO.num_imitation_steps]:
        assert {"black/imitation_loss", "white/imitation_loss"} <= row.keys()
    for row in rows[TWO.num_imitation_steps :]:
        assert row["black/reward"] == pytest.approx(-row["white/reward"])
        assert row["black/mismatch"] == row["white/mismatch"] == 0.0
    # They learn different things: data and first weights of each are its own.
    assert rows[0]["black/imitation_loss"] != rows[0]["white/imitation_loss"]


def test_games_that_cannot_be_are_refused_before_a_run_begins(
    embedded: Deployment, tmp_path: Path
) -> None:
    config = dataclasses.replace(TWO, data="chess", output_dir=tmp_path / "new")
    with embedded.client() as client:
        num_runs = len(client.runs.list())
        with pytest.raises(tinsmith.ConfigurationError, match="there is no game 'chess'"):
            two_policies.main(config, client)
        assert len(client.runs.list()) == num_runs
