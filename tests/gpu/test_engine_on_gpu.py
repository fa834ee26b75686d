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


@pytest.fixture(autouse=True)
def _own_kernels() -> None:
    """Let each test compile its own: torch keeps few models' kernels in a process."""
    torch.compiler.reset()


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


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of the width of Qwen3-0.6B."""
    return save_tiny(
        tmp_path_factory.mktemp("wide"),
        "qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_long_sequences_of_real_width_keep_their_bits_beside_many_others(
    wide_dir: Path, dtype: str, compiled: bool
) -> None:
    engine = Engine.load(
        wide_dir, dtype=dtype, device="cuda", compiled=compiled, max_resident_runs=16
    )
    assert engine.info.exactness == "exact"
    lengths = [(700, 90), (40,), *((3 + 29 * index, 300) for index in range(1, 13))]
    requests = []
    for index, of_run in enumerate(lengths):
        run = f"run-{index}"
        engine.create_run(run, LoraConfig(rank=8, seed=index))
        randomise_b(engine, run)
        batch = make_batch(lengths=of_run, seed=index)
        requests.append(
            BatchRequest(
                run=run, batch=batch, loss="cross_entropy", loss_config={}, is_backward=True
            )
        )

    def bits(chosen: list[BatchRequest]) -> list[tuple[bytes, bytes]]:
        found = []
        for request, result in zip(chosen, engine.compute(chosen), strict=True):
            assert isinstance(result, BatchResult)
            gradient = engine.export_state(str(request.run)).tensors["grad"]
            engine.clear_gradient(str(request.run))
            scores = b"".join(one.tobytes() for one in result.logprobs)
            found.append((scores, gradient.numpy().tobytes()))
        return found

    together = bits(requests)
    for index in (0, 1, 5):
        assert bits([requests[index]])[0] == together[index], lengths[index]
