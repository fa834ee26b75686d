"""Which rank computes which microbatch, and how calls travel: decided without a process group."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.engine.conftest import make_batch

from tinsmith_engine import AdamParams, FullConfig, LoraConfig, RunState
from tinsmith_engine.base.types import BatchRequest
from tinsmith_engine.distributed.microbatch_assignment import Loads
from tinsmith_engine.distributed.process_group import Ranks
from tinsmith_engine.distributed.serialization import decode, digest, encode
from tinsmith_runtime.errors import RunNotFoundError


def test_pieces_of_one_operation_go_to_lanes_in_turns() -> None:
    lanes = Loads(2).assign([64, 64, 32])
    assert (lanes.num_partials, lanes.owners) == (2, [0, 1])
    assert Loads(4).assign([64, 64]).owners == [0, 1]


def test_operations_of_one_piece_are_spread_over_the_ranks() -> None:
    loads = Loads(4)
    assert [loads.assign([64]).first_rank for _ in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_neighbour_moves_lanes_and_not_their_order() -> None:
    loads = Loads(2)
    loads.assign([100])
    lanes = loads.assign([64, 64, 64])
    assert lanes.owners == [1, 0]
    assert loads.rows == [164, 128]


def test_pieces_without_a_gradient_go_where_least_is_to_do() -> None:
    loads = Loads(2)
    assert [loads.place_one(rows) for rows in (64, 16, 16, 32, 16)] == [0, 1, 1, 1, 0]


def test_calls_come_out_as_they_went_in() -> None:
    state = RunState(
        config=FullConfig(),
        version=3,
        tensors={"theta": torch.randn(7), "m": torch.zeros(0), "half": torch.ones(3).bfloat16()},
        has_gradient=False,
    )
    request = BatchRequest(
        run="run",
        batch=make_batch(),
        loss="ppo",
        loss_config={"clip_low_threshold": np.float32(0.5)},  # type: ignore[dict-item]
        is_backward=True,
    )
    call = ("base", "method", ([("a", AdamParams())], LoraConfig(rank=4, seed=1 << 40), state))
    found = decode(encode(call))
    assert found[:2] == call[:2]
    assert found[2][:2] == call[2][:2]
    for name, tensor in state.tensors.items():
        assert torch.equal(found[2][2].tensors[name], tensor)
        assert found[2][2].tensors[name].dtype == tensor.dtype
    again = decode(encode(request))
    assert (again.loss_config, again.is_backward) == ({"clip_low_threshold": 0.5}, True)
    for datum, wanted in zip(again.batch, request.batch, strict=True):
        np.testing.assert_array_equal(datum.tokens_T, wanted.tokens_T)
        np.testing.assert_array_equal(datum.loss_inputs["weights"], wanted.loss_inputs["weights"])
    assert encode(again) == encode(request)


def test_what_is_no_value_of_the_engine_does_not_travel() -> None:
    with pytest.raises(TypeError):
        encode(object())
    with pytest.raises(KeyError):
        decode(encode(FullConfig()).replace(b"FullConfig", b"ExecConfig"))


def test_outcomes_are_compared_by_value() -> None:
    error = RunNotFoundError("no run")
    assert digest(error) == digest(RunNotFoundError("no run")) != digest(RunNotFoundError("none"))
    assert digest([1.0, float("nan")]) == digest([1.0, float("nan")])
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))


def test_one_rank_needs_no_process_group() -> None:
    ranks = Ranks.start(rank=0, world_size=1)
    assert ranks.is_alone
    assert ranks.broadcast(b"message", "tag") == b"message"
    assert ranks.all_gather(b"message", "tag") == [b"message"]
    ranks.meet()
    ranks.close()
