"""The states of parked runs that stay in host memory."""

from __future__ import annotations

import torch

from tinsmith_engine import LoraConfig, RunState
from tinsmith_trainer.residency.host_cache import ParkedState, ParkedStates


def parked(num_numbers: int = 25) -> ParkedState:
    tensors = {"theta": torch.zeros(num_numbers)}
    state = RunState(LoraConfig(rank=1, seed=0), 3, tensors, has_gradient=False)
    return ParkedState(state, 7, (5,))


def test_a_state_is_taken_once() -> None:
    states = ParkedStates(1000)
    kept = parked()
    states.put("a", kept)
    assert states.size_bytes == 100
    assert states.take("a") is kept
    assert states.take("a") is None
    assert states.size_bytes == 0


def test_the_state_parked_longest_ago_goes_first() -> None:
    states = ParkedStates(250)
    for run in ("a", "b", "a", "c"):
        states.put(run, parked())
    assert states.take("b") is None
    assert states.take("a") is not None
    assert states.take("c") is not None


def test_a_state_over_the_budget_is_not_kept() -> None:
    states = ParkedStates(99)
    states.put("a", parked())
    assert (states.take("a"), states.size_bytes) == (None, 0)
