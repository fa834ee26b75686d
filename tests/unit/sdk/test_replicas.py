"""Which sampler a call goes to: the least loaded, and then the one that knows the prompt."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest

from tinsmith.replicas import Replicas, prompt_bytes
from tinsmith.tensors import encode_tokens
from tinsmith.types import ModelInput
from tinsmith.v1 import trajectories_pb2

ADDRESSES = ["a:1", "b:1", "c:1", "d:1"]


def text(num_tokens: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(4 * num_tokens)


@pytest.fixture
def replicas() -> Replicas:
    return Replicas(clock=lambda: 0.0)


def test_one_replica_gets_everything(replicas: Replicas) -> None:
    assert replicas.choose(["a:1"], text(1000)).reason == "only_one"


def test_new_prompts_go_to_the_least_loaded(replicas: Replicas) -> None:
    loads = Counter(dict.fromkeys(ADDRESSES, 0))
    with contextlib.ExitStack() as calls:
        for seed in range(40):
            choice = replicas.choose(ADDRESSES, text(300, seed))
            assert choice.reason == "least_loaded"
            calls.enter_context(replicas.in_flight(choice.address))
            loads[choice.address] += 1
            assert max(loads.values()) - min(loads.values()) <= 1


def test_the_same_prompt_again_is_a_new_one(replicas: Replicas) -> None:
    with contextlib.ExitStack() as calls:
        chosen = []
        for _ in range(8):
            choice = replicas.choose(ADDRESSES, text(500))
            calls.enter_context(replicas.in_flight(choice.address))
            chosen.append(choice.address)
    assert Counter(chosen) == dict.fromkeys(ADDRESSES, 2)


def test_a_conversation_stays_where_it_is(replicas: Replicas) -> None:
    prompt = text(300)
    home = replicas.choose(ADDRESSES, prompt).address
    for turn in range(1, 20):
        prompt += text(100, turn)
        # Others come and go meanwhile.
        with replicas.in_flight(home):
            choice = replicas.choose(ADDRESSES, prompt)
        assert (choice.address, choice.reason) == (home, "sticky")


def test_a_system_prompt_in_common_is_no_conversation(replicas: Replicas) -> None:
    system = text(200)
    replicas.choose(ADDRESSES, system)
    assert replicas.choose(ADDRESSES, system + text(900, 1)).reason == "least_loaded"


def test_a_group_goes_on_where_each_of_it_is(replicas: Replicas) -> None:
    task = text(400)
    members = [task + text(200, seed) for seed in range(1, 5)]
    with contextlib.ExitStack() as calls:
        for _ in members:
            first = replicas.choose(ADDRESSES, task).address
            calls.enter_context(replicas.in_flight(first))
    homes = []
    with contextlib.ExitStack() as calls:
        for member in members:
            choice = replicas.choose(ADDRESSES, member)
            assert choice.reason == "sticky"
            calls.enter_context(replicas.in_flight(choice.address))
            homes.append(choice.address)
    assert sorted(homes) == ADDRESSES
    for member, home in zip(members, homes, strict=True):
        assert replicas.choose(ADDRESSES, member + text(50, 9)).address == home


def test_a_full_replica_loses_conversations(replicas: Replicas) -> None:
    prompt = text(300)
    home = replicas.choose(ADDRESSES, prompt).address
    with contextlib.ExitStack() as calls:
        for _ in range(20):
            calls.enter_context(replicas.in_flight(home))
        choice = replicas.choose(ADDRESSES, prompt + text(50, 1))
        assert choice.reason == "full"
        assert choice.address != home
    # It stays where it went.
    longer = prompt + text(50, 1) + text(50, 2)
    assert replicas.choose(ADDRESSES, longer).address == choice.address


def test_a_replica_that_failed_is_left_out_for_a_while() -> None:
    now_s = 0.0
    replicas = Replicas(clock=lambda: now_s)
    prompt = text(300)
    home = replicas.choose(ADDRESSES, prompt).address
    replicas.note_failure(home)
    longer = prompt + text(50, 1)
    assert replicas.choose(ADDRESSES, longer).address != home
    for seed in range(20):
        assert replicas.choose(ADDRESSES, text(100, seed)).address != home
    assert replicas.choose([home], longer).address == home
    now_s = 6.0
    assert home in {replicas.choose(ADDRESSES, text(100, seed)).address for seed in range(50)}


def test_a_replica_that_left_is_forgotten(replicas: Replicas) -> None:
    prompt = text(300)
    home = replicas.choose(ADDRESSES, prompt).address
    others = [one for one in ADDRESSES if one != home]
    choice = replicas.choose(others, prompt + text(100, 1))
    assert choice.address in others
    assert choice.reason == "least_loaded"


def test_short_prompts_find_the_same_replica_while_loads_are_equal(replicas: Replicas) -> None:
    assert len({replicas.choose(ADDRESSES, text(8)).address for _ in range(10)}) == 1


def test_the_memory_of_prompts_is_bounded() -> None:
    replicas = Replicas(clock=lambda: 0.0, max_known=100)
    first = replicas.choose(ADDRESSES, text(100, 10_000))
    for seed in range(200):
        replicas.choose(ADDRESSES, text(100, seed))
    assert first.reason == "least_loaded"
    assert replicas.choose(ADDRESSES, text(100, 10_000) + text(20, 1)).reason == "least_loaded"
    assert replicas.choose(ADDRESSES, text(100, 199) + text(20, 1)).reason == "sticky"


def test_a_long_prompt_has_few_borders(replicas: Replicas) -> None:
    prompt = text(200_000)
    home = replicas.choose(ADDRESSES, prompt).address
    assert replicas.choose(ADDRESSES, prompt + text(10, 1)).address == home


def test_a_prompt_that_goes_on_begins_with_the_same_bytes() -> None:
    first = ModelInput.from_ints([5, 6, 7])
    longer = trajectories_pb2.ModelInput()
    longer.chunks.add(tokens=encode_tokens([5, 6, 7, 8]))
    longer.chunks.add(tokens=encode_tokens([9] * 1000))
    short = trajectories_pb2.ModelInput()
    short.chunks.add(tokens=encode_tokens(first.to_ints()))
    assert prompt_bytes(longer).startswith(prompt_bytes(short))
    image = trajectories_pb2.ModelInput()
    image.chunks.add(tokens=encode_tokens([5, 6, 7]))
    image.chunks.add().image.data = b"png"
    assert prompt_bytes(image).startswith(prompt_bytes(short))
    assert prompt_bytes(trajectories_pb2.ModelInput()) == b""


def test_what_one_project_sent_tells_another_nothing(replicas: Replicas) -> None:
    secret = text(1000)
    replicas.choose(ADDRESSES, secret, scope="theirs")
    longer = secret + text(64, 1)
    assert replicas.choose(ADDRESSES, longer, scope="others").reason == "least_loaded"
    assert replicas.choose(ADDRESSES, longer, scope="theirs").reason == "sticky"


def test_many_prompts_of_one_project_make_no_other_forget() -> None:
    replicas = Replicas(clock=lambda: 0.0, max_known=16)
    kept = text(1000)
    replicas.choose(ADDRESSES, kept, scope="calm")
    for seed in range(1, 100):
        replicas.choose(ADDRESSES, text(300, seed), scope="busy")
    assert replicas.choose(ADDRESSES, kept + text(64, 1), scope="calm").reason == "sticky"
