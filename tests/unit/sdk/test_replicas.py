"""Which replica a call goes to: by its prompt, and by the calls in flight."""

from __future__ import annotations

import contextlib
from collections import Counter

from tinsmith.replicas import Replicas

THREE = ["a:1", "b:1", "c:1"]


def test_calls_of_one_prompt_prefer_one_replica() -> None:
    replicas = Replicas()
    chosen = {replicas.choose(THREE, b"a prompt" * 50) for _ in range(20)}
    assert len(chosen) == 1
    spread = Counter(replicas.choose(THREE, b"prompt %d" % number) for number in range(300))
    assert set(spread) == set(THREE)
    assert min(spread.values()) > 60


def test_a_replica_that_comes_moves_few_prompts() -> None:
    replicas = Replicas()
    prompts = [b"prompt %d" % number for number in range(300)]
    before = {prompt: replicas.choose(THREE, prompt) for prompt in prompts}
    after = {prompt: replicas.choose([*THREE, "d:1"], prompt) for prompt in prompts}
    assert all(after[prompt] in (before[prompt], "d:1") for prompt in prompts)


def test_one_prompt_in_flight_many_times_uses_all_replicas() -> None:
    replicas = Replicas()
    with contextlib.ExitStack() as calls:
        spread: Counter[str] = Counter()
        for _ in range(60):
            address = replicas.choose(THREE, b"one prompt")
            calls.enter_context(replicas.in_flight(address))
            spread[address] += 1
        assert set(spread) == set(THREE)
        assert max(spread.values()) <= 26
    # Nothing is in flight any more.
    assert len({replicas.choose(THREE, b"one prompt") for _ in range(10)}) == 1


def test_a_replica_that_failed_comes_last_for_a_while() -> None:
    now = 0.0
    replicas = Replicas(lambda: now)
    first = replicas.choose(THREE, b"p")
    replicas.note_failure(first)
    assert replicas.choose(THREE, b"p") != first
    assert replicas.choose([first], b"p") == first
    now = 60.0
    assert replicas.choose(THREE, b"p") == first
