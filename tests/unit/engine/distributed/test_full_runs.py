"""Full-parameter runs by FSDP2 on two ranks, against one process and against plain torch.

Tolerance 1e-5 relative: FSDP runs the transformers module, the engine its own packed decoder, so
sums over up to a few hundred terms run in another order; measured about 1e-6 for gradients. Weights
after AdamW are held to the same 1e-5: a step moves a weight by 1e-3 of its size at most, so the
part of Adam that amplifies small gradients stays below that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.engine.conftest import reference_logprobs, relative_error, save_tiny
from tests.unit.engine.distributed import scenarios
from tests.unit.engine.distributed.full_files import read_state, write_state
from tests.unit.engine.distributed.group import run_group

from tinsmith_engine import Engine

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model_dir = save_tiny(tmp_path_factory.mktemp("full") / "model", "qwen3")
    # Stored as models are published; what is trained is float32 all the same.
    stored = load_file(model_dir / "model.safetensors")
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}
    save_file(halved, model_dir / "model.safetensors", {"format": "pt"})
    return Engine.load(model_dir, micro_batch_tokens=scenarios.MICRO_BATCH_TOKENS)


@pytest.fixture(scope="module")
def reference(engine: Engine) -> dict[str, torch.Tensor]:
    return scenarios.train_full(engine)


@pytest.fixture(scope="module")
def folder(engine: Engine, reference: dict[str, torch.Tensor]) -> Path:
    """What two ranks did, and before them one process: its state is in `one`."""
    folder = Path(str(engine._source)).parent
    scenarios.collect(engine, scenarios.full_requests(0)[:1])
    write_state(engine.export_state("full"), engine.model.full_layout, folder / "one")
    run_group("full", folder)
    return folder


def test_two_ranks_train_as_one_process_does(
    folder: Path, reference: dict[str, torch.Tensor]
) -> None:
    found = load_file(folder / "full.safetensors")
    assert found.keys() == reference.keys()
    for name, wanted in reference.items():
        assert relative_error(found[name], wanted) <= TOLERANCE, name


def test_two_ranks_train_as_plain_torch_does(folder: Path, engine: Engine) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    adam = scenarios.FULL_ADAM
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
    )
    found = load_file(folder / "full.safetensors")
    layout = engine.model.full_layout
    for step in range(scenarios.FULL_STEPS):
        for number, one in enumerate(scenarios.full_requests(step)):
            losses = [_loss(one.loss, reference_logprobs(model, d), d) for d in one.batch]
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            grads = layout.views(found[f"{step}/{number}/full/grad"])
            for name, parameter in model.named_parameters():
                assert relative_error(grads[name], parameter.grad) <= TOLERANCE, name
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), adam.grad_clip_norm)
        assert relative_error(found[f"{step}/norm"], norm) <= TOLERANCE
        optimizer.step()
        optimizer.zero_grad()
        theta = layout.views(found[f"{step}/theta"])
        for name, parameter in model.named_parameters():
            assert relative_error(theta[name], parameter.detach()) <= TOLERANCE, name


def _loss(loss: str, logprobs: torch.Tensor, datum: Any) -> torch.Tensor:
    inputs = {name: torch.from_numpy(value) for name, value in datum.loss_inputs.items()}
    if loss == "cross_entropy":
        return -(inputs["weights"] * logprobs).sum()
    mask, advantages = inputs["sequence_ratio_mask"], inputs["advantages"]
    mean = ((logprobs - inputs["logprobs"]) * mask).sum() / mask.sum()
    ratio = mean.exp().detach() * (logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


def test_repeating_gives_the_same_bits(folder: Path) -> None:
    found = load_file(folder / "again.safetensors")
    for name in [name for name in found if name.startswith("0/")]:
        assert torch.equal(found[name], found["1" + name[1:]]), name


def test_each_rank_holds_its_part(folder: Path, engine: Engine) -> None:
    held = [json.loads((folder / f"full-{rank}.json").read_text())["bytes"] for rank in range(2)]
    whole = 4 * engine.model.full_layout.num_numbers
    assert sum(held) == whole
    assert max(held) <= 0.51 * whole


def test_errors_are_typed_and_leave_the_run(folder: Path) -> None:
    facts = json.loads((folder / "full-0.json").read_text())
    assert facts["kinds"] == [
        "NonFiniteLossError",
        "InvalidFieldError",
        "AlreadyExistsError",
        "NonFiniteLossError",
        "NoGradientError",
    ]
    assert facts["is_kept"]


@pytest.mark.parametrize("name", ["copy", "imported"])
def test_a_run_goes_on_from_its_files_or_its_state(folder: Path, name: str) -> None:
    _assert_equal(
        load_file(folder / f"{name}.safetensors"), load_file(folder / "saved.safetensors")
    )


def test_files_of_two_ranks_load_in_one_process(folder: Path, engine: Engine) -> None:
    state = read_state(folder / "two", engine.model.full_layout)
    _assert_equal(state.tensors, load_file(folder / "saved.safetensors"))
    assert (state.version, state.adam_steps, state.has_gradient) == (3, 3, True)
    engine.import_state("from-two", state)
    engine.optim_step("from-two", scenarios.FULL_ADAM)
    engine.drop_run("from-two")


def test_files_of_one_process_load_in_two_ranks(folder: Path, engine: Engine) -> None:
    wanted = read_state(folder / "one", engine.model.full_layout).tensors
    _assert_equal(load_file(folder / "from-one.safetensors"), wanted)
    _assert_equal(engine.export_state("full").tensors, wanted)


def test_no_file_is_a_pickle(folder: Path) -> None:
    for saved in ("two", "exported"):
        files = [file for file in (folder / saved).rglob("*") if file.is_file()]
        assert {file.suffix for file in files} <= {".safetensors", ".json"}
        assert not any(file.read_bytes()[:1] == b"\x80" for file in files if file.suffix == ".json")
    shards = list((folder / "two" / "model").glob("*.safetensors"))
    assert len(shards) == 2


def test_the_export_loads_in_transformers(folder: Path, engine: Engine) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32)
    wanted = engine.model.full_layout.views(load_file(folder / "saved.safetensors")["theta"])
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].detach(), tensor), name
    Engine.load(folder / "exported", exact=False)


def _assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
