"""The engine on one GPU: the same results as on the CPU, and the same promises.

Not part of `make test`: these need a GPU and a CUDA build of torch (`make bench-gpu`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.engine.conftest import LORA, make_batch, randomise_b, relative_error, save_tiny

from tinsmith_engine import AdamParams, BatchRequest, BatchResult, Engine, LoraConfig


@pytest.fixture(scope="module", autouse=True)
def _gpu() -> None:
    assert torch.cuda.is_available(), "these tests need a GPU and a CUDA build of torch"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")


def gradient(engine: Engine, loss: str) -> torch.Tensor:
    engine.create_run("run", LORA)
    randomise_b(engine, "run")
    engine.forward_backward("run", make_batch(loss), loss, {})
    return engine.export_state("run").tensors["grad"]


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
def test_gradients_equal_the_cpus(model_dir: Path, loss: str) -> None:
    found, wanted = (
        gradient(Engine.load(model_dir, device=device, compiled=False), loss)
        for device in ("cuda", "cpu")
    )
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_exact_mode_starts_and_neighbours_change_no_bit(
    model_dir: Path, dtype: str, compiled: bool
) -> None:
    # The start-up probe is the test; this repeats it with steps between.
    engine = Engine.load(model_dir, dtype=dtype, device="cuda", compiled=compiled)
    assert engine.info.exactness == "exact"
    for index, run in enumerate(("alone", "mixed", "other")):
        engine.create_run(run, LoraConfig(rank=8, seed=0 if run != "other" else index))

    def request(run: str, seed: int) -> BatchRequest:
        batch = make_batch(seed=seed)
        return BatchRequest(
            run=run, batch=batch, loss="cross_entropy", loss_config={}, is_backward=True
        )

    for seed in range(3):
        assert isinstance(engine.compute([request("alone", seed)])[0], BatchResult)
        engine.compute([request("other", seed + 100), request("mixed", seed)])
        engine.optim_steps([(run, AdamParams(learning_rate=1e-2)) for run in ("alone", "mixed")])
    alone, mixed = (engine.export_state(run).tensors for run in ("alone", "mixed"))
    for name, numbers_P in alone.items():
        assert torch.equal(numbers_P, mixed[name]), name
