"""Adapter runs on two ranks against one process, on a sharded and on a replicated base model.

The same program runs on both sides (`scenarios.train`). Log-probabilities, and gradients of
operations that are one piece, must be equal to the bit. Gradients of several pieces add the same
float32 numbers in another order: 2e-6 relative, they measure about 1e-7.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.engine.conftest import relative_error, save_tiny
from tests.unit.engine.distributed import scenarios
from tests.unit.engine.distributed.group import Group, run_group

from tinsmith_engine import Engine

TOLERANCE = 2e-6
NUM_LAYERS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny(folder / "model", "qwen3", num_hidden_layers=NUM_LAYERS)
    save_tiny(folder / "untied", "llama", tie_word_embeddings=False)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder / "model", micro_batch_tokens=scenarios.MICRO_BATCH_TOKENS)


@pytest.fixture(scope="module")
def reference(engine: Engine) -> dict[str, torch.Tensor]:
    return scenarios.train(engine)


@pytest.fixture(scope="module")
def sharded(folder: Path) -> Path:
    run_group("sharded", folder)
    return folder


def facts(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"facts-{rank}.json").read_text())
    return found


def assert_equal_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_as_on_one_process(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        kind, _, rest = name.partition("/")
        is_one_piece = any(rest.split("/")[0] == run for run in scenarios.ONE_PIECE)
        if kind in ("first", "second", "scored") and (is_one_piece or "/grad" not in name):
            assert torch.equal(found[name], tensor), name
        elif kind == "stepped":
            # Adam divides by the root of the gradient's square: small gradients count in full.
            assert relative_error(found[name], tensor) <= 1e-4, name
        else:
            assert relative_error(found[name], tensor) <= TOLERANCE, name


def test_a_sharded_base_computes_what_one_process_does(
    sharded: Path, reference: dict[str, torch.Tensor]
) -> None:
    assert_as_on_one_process(load_file(sharded / "trained.safetensors"), reference)


def test_a_replicated_base_gives_the_bits_of_a_sharded_one(sharded: Path) -> None:
    assert_equal_bits(
        load_file(sharded / "replicated.safetensors"), load_file(sharded / "trained.safetensors")
    )


def test_an_untied_head_in_bfloat16_and_gradient_checkpointing(sharded: Path) -> None:
    engine = Engine.load(
        sharded / "untied", dtype="bfloat16", micro_batch_tokens=scenarios.MICRO_BATCH_TOKENS
    )
    assert_as_on_one_process(load_file(sharded / "untied.safetensors"), scenarios.train(engine))


def test_neighbours_and_order_change_no_bit(sharded: Path) -> None:
    alone = load_file(sharded / "alone.safetensors")
    for other in ("together", "reverse"):
        assert_equal_bits(load_file(sharded / f"{other}.safetensors"), alone)


def test_ranks_hold_the_same_runs(sharded: Path) -> None:
    assert_equal_bits(
        load_file(sharded / "state-1.safetensors"), load_file(sharded / "state-0.safetensors")
    )


def test_a_rank_holds_its_part_of_the_base(sharded: Path, engine: Engine) -> None:
    layout = engine.model.full_layout
    embedding = 4 * layout.entries["model.embed_tokens.weight"].num_numbers
    layer = (4 * layout.num_numbers - embedding) / NUM_LAYERS
    for rank in range(2):
        share = facts(sharded, rank)["bytes"] - embedding - 2 * layer
        assert share <= 1.02 * 4 * layout.num_numbers / 2


def test_the_number_of_ranks_is_part_of_the_fingerprint(sharded: Path, engine: Engine) -> None:
    assert "ranks=2 base=sharded" in facts(sharded)["info"]
    assert "ranks" not in engine.info.fingerprint


def test_errors_are_typed_and_of_one_operation(sharded: Path) -> None:
    assert facts(sharded)["errors"] == {
        "bad": "NonFiniteLossError",
        "good": "BatchResult",
        "unknown": "RunNotFoundError",
        "twice": "AlreadyExistsError",
    }


def test_a_pass_that_fails_on_one_rank_fails_on_all(
    sharded: Path, reference: dict[str, torch.Tensor]
) -> None:
    assert json.loads((sharded / "failing.json").read_text()) == {
        "memory": ["BatchResult", "BatchResult", "65"],
        "fault": ["BatchResult", "InternalError"],
    }
    found = load_file(sharded / "failing.safetensors")
    alone = load_file(sharded / "alone.safetensors")
    assert torch.equal(found["small-memory"], alone["small/grad"])
    assert torch.equal(found["small-fault"], alone["small/grad"])


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped")],
)
def test_a_lost_rank_is_a_typed_failure_behind_the_deadline(
    tmp_path: Path, folder: Path, number: signal.Signals
) -> None:
    (tmp_path / "model").symlink_to(folder / "model")
    group = Group("lost", tmp_path, timeout_s=4.0)
    try:
        leader, follower = group.processes
        deadline_s = time.monotonic() + 180
        while not (tmp_path / "leader.ready").exists():
            assert leader.poll() is None, (tmp_path / "lost-0.log").read_text()
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.02)
        follower.send_signal(number)
        # The deadline of 4 s is the group's; without it the leader would wait for ever.
        assert leader.wait(180) == 4, (tmp_path / "lost-0.log").read_text()
        assert "rank 0 of 2 waited for" in (tmp_path / "lost-0.log").read_text()
    finally:
        group.kill()


def test_followers_end_when_rank_0_dies(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "model").symlink_to(folder / "model")
    group = Group("lost", tmp_path, timeout_s=4.0)
    try:
        leader, follower = group.processes
        deadline_s = time.monotonic() + 180
        while not (tmp_path / "leader.ready").exists():
            assert leader.poll() is None, (tmp_path / "lost-0.log").read_text()
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.02)
        leader.kill()
        assert follower.wait(30) == 5
        assert "this rank cannot go on" in (tmp_path / "lost-1.log").read_text()
    finally:
        group.kill()


def test_ranks_that_differ_do_not_go_on(sharded: Path) -> None:
    for rank in range(2):
        assert "the ranks disagree about optim_step" in facts(sharded, rank)["diverged"]
