"""A model whose experts adapters do not reach: refused when a run is created."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.integration.servers import BASE_MODEL, embedded_server
from tests.unit.engine.conftest import save_tiny
from tests.unit.engine.test_moe import FUSED

import tinsmith


def test_a_run_that_would_leave_out_experts_is_refused_at_once(
    tmp_path: Path, model_dir: Path
) -> None:
    mixtral = save_tiny(tmp_path / "model", "mixtral", **FUSED["mixtral"])
    for path in model_dir.glob("tokenizer*"):
        shutil.copy(path, mixtral)
    with embedded_server(tmp_path / "data", mixtral) as server, server.client() as client:
        with pytest.raises(tinsmith.InvalidArgumentError, match="does not reach its experts"):
            client.create_lora_training_run(BASE_MODEL, rank=4)
        run = client.create_lora_training_run(BASE_MODEL, rank=4, train_mlp=False)
        datum = tinsmith.Datum(
            model_input=tinsmith.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0] * 3},
        )
        assert run.forward_backward([datum], "cross_entropy").result(60).loss > 0
        states = {each.name: each.state for each in client.runs.list()}
        assert states.pop(run.name) == "active"
        assert list(states.values()) == ["failed"]
