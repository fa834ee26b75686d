"""What samplers say that they have to do counts beside the calls of this process."""

from __future__ import annotations

import contextlib

import pytest
from tests.support.clock import Clock

from tinsmith.replicas import Replicas

ADDRESSES = ["a:1", "b:1", "c:1"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replicas(clock: Clock) -> Replicas:
    return Replicas(clock)


def prompt(number: int) -> bytes:
    return number.to_bytes(4, "little") * 300


def chosen(replicas: Replicas, numbers: range = range(20)) -> set[str]:
    return {replicas.choose(ADDRESSES, prompt(number)).address for number in numbers}


def test_a_replica_that_others_keep_busy_is_spared(replicas: Replicas) -> None:
    assert chosen(replicas) == set(ADDRESSES)
    replicas.note_loads([("a:1", 5, 0.0), ("b:1", 2, 0.0), ("c:1", 0, 0.0)])
    assert chosen(replicas, range(100, 120)) == {"c:1"}
    with contextlib.ExitStack() as calls:
        for _ in range(3):
            calls.enter_context(replicas.in_flight("c:1"))
        assert chosen(replicas, range(200, 220)) == {"b:1"}


def test_calls_of_this_process_are_not_counted_twice(replicas: Replicas) -> None:
    with contextlib.ExitStack() as calls:
        for _ in range(4):
            calls.enter_context(replicas.in_flight("a:1"))
        # All that `a` has is of this process; `b` and `c` have as much of others.
        replicas.note_loads([("a:1", 4, 0.0), ("b:1", 4, 0.0), ("c:1", 4, 0.0)])
        assert chosen(replicas) == set(ADDRESSES)
    # They ended: `a` has nothing left, whatever it said before.
    assert chosen(replicas, range(100, 120)) == {"a:1"}


def test_a_word_that_is_old_counts_no_more(replicas: Replicas, clock: Clock) -> None:
    replicas.note_loads([("a:1", 50, 10.0), ("b:1", 50, 0.0)])
    clock.now_s += 4.0
    assert chosen(replicas) == {"c:1"}
    clock.now_s += 2.0
    assert chosen(replicas, range(100, 140)) == {"a:1", "c:1"}
    clock.now_s += 10.0
    assert chosen(replicas, range(200, 240)) == set(ADDRESSES)


def test_a_conversation_leaves_a_replica_that_others_fill(replicas: Replicas) -> None:
    home = replicas.choose(ADDRESSES, prompt(1)).address
    longer = prompt(1) + prompt(2)[:400]
    replicas.note_loads([(home, 30, 0.0)])
    choice = replicas.choose(ADDRESSES, longer)
    assert (choice.address != home, choice.reason) == (True, "full")


def test_a_failed_replica_is_named_as_the_reason(replicas: Replicas, clock: Clock) -> None:
    home = replicas.choose(ADDRESSES, prompt(1)).address
    replicas.note_failure(home)
    choice = replicas.choose(ADDRESSES, prompt(1) + prompt(2)[:400])
    assert (choice.address != home, choice.reason) == (True, "failover")
    clock.now_s += 60.0
    longest = prompt(1) + prompt(2)[:400] + prompt(3)[:100]
    assert replicas.choose(ADDRESSES, longest).reason == "sticky"
