"""DPO end to end: it learns a preference, holds pairs back, and survives Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from tests.integration.servers import Deployment
from tests.integration.test_recipes import weights_sha256

import tinsmith
from tinsmith.recipes import dpo
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.run_log import read_metrics

CONFIG = dpo.Config(num_steps=8, batch_size=8, num_warmup_steps=1, rank=8, learning_rate=2e-2)


def test_a_preference_is_learned_and_holds_for_pairs_that_were_held_out(
    embedded: Deployment, tmp_path: Path
) -> None:
    with embedded.client() as client:
        summary = dpo.main(dataclasses.replace(CONFIG, output_dir=tmp_path), client)
        checkpoint = client.checkpoints.get(summary.checkpoint)
    # The reference is what training begins with, to the bit.
    assert summary.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert summary.before.metrics["held_out_margin"] == 0
    assert checkpoint.version == CONFIG.num_steps
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["dpo_loss"] < 0.6
    assert last["chosen_reward"] - last["rejected_reward"] == pytest.approx(
        last["margin"], abs=1e-5
    )
    assert summary.after.metrics["held_out_accuracy"] >= 0.7
    assert summary.after.metrics["held_out_margin"] > 0
    assert (tmp_path / "dpo_loss.png").is_file()


class StopsAfter(Observer):
    """Stops a recipe after some steps, as Ctrl-C does."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def step_done(self, num_done: int, num_steps: int, metrics: object) -> None:
        """Stop behind a step."""
        del num_steps, metrics
        if num_done == self._num_steps:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_from_a_checkpoint_with_the_same_bits(
    embedded: Deployment, tmp_path: Path
) -> None:
    data = tmp_path / "pairs.jsonl"
    rows = [{"prompt": str(number), "chosen": "yes", "rejected": "no"} for number in range(5)]
    data.write_text("\n".join(map(json.dumps, rows)))
    with embedded.client() as client:
        short = dataclasses.replace(CONFIG, data=str(data), num_steps=1, batch_size=2)
        first = dpo.main(dataclasses.replace(short, output_dir=tmp_path / "1"), client)
        config = dataclasses.replace(short, num_steps=3, eval_every=1, begin_from=first.checkpoint)
        calm = dpo.main(dataclasses.replace(config, output_dir=tmp_path / "a"), client)
        # What it begins from is the reference.
        assert calm.losses[0] == pytest.approx(math.log(2), abs=1e-6)
        cut = dataclasses.replace(config, output_dir=tmp_path / "b")
        with pytest.raises(KeyboardInterrupt):
            dpo.main(cut, client, StopsAfter(1))
        resumed = dpo.main(cut, client)
        assert weights_sha256(client, resumed.checkpoint) == weights_sha256(client, calm.checkpoint)
    logged = read_metrics(tmp_path / "b" / "metrics.jsonl")
    assert [row["step"] for row in logged] == [0, 1, 2]
    assert "held_out_accuracy" in read_metrics(tmp_path / "a" / "metrics.jsonl")[1]


def test_a_job_without_a_sampler_is_refused(embedded: Deployment) -> None:
    observer = Observer()
    observer.has_sampler = False
    with (
        embedded.client() as client,
        pytest.raises(tinsmith.ConfigurationError, match="there is none; give the job a sampler"),
    ):
        dpo.main(CONFIG, client, observer)
