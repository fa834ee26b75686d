"""An RL recipe through the service: the trainer computes what the sampler said, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.servers import EmbeddedThread

from tinsmith.recipes import rl
from tinsmith.recipes.experiment.run_log import read_metrics

NUM_STEPS = 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("adapter", "dtype"), [("lora", "float32"), ("lora", "bfloat16"), ("full", "bfloat16")]
)
def test_the_mismatch_is_zero_at_every_step(
    make_embedded: Callable[..., EmbeddedThread], tmp_path: Path, adapter: str, dtype: str
) -> None:
    deployment = make_embedded(trainer={"dtype": dtype, "exact": True}).start()
    # A game of several turns, whose rewards differ before the model knows anything.
    config = dataclasses.replace(
        rl.Config(),
        environment="guessing",
        environment_config='{"low": 0, "high": 9, "max_turns": 3, "shaping": 1.0}',
        adapter=adapter,
        num_steps=NUM_STEPS,
        num_problems=3,
        group_size=4,
        num_validation=2,
        output_dir=tmp_path / "rl",
    )
    with deployment.client() as client:
        assert {model.dtype for model in client.list_models()} == {dtype}
        rl.main(config, client)
    rows = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(NUM_STEPS))
    assert min(row["trained"] for row in rows) > 0
    assert [row["mismatch"] for row in rows] == [0.0] * NUM_STEPS
