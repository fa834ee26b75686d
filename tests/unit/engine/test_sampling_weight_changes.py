"""Weights that change between tokens: newer ones take effect, older ones are held and let go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.sampled import LONG, random_version
from tests.unit.engine.conftest import LORA, make_batch, save_tiny
from tests.unit.engine.test_sampling import PROMPT, forward_logprobs, request, run_all, same

from tinsmith_engine import (
    AdamParams,
    AdapterConfig,
    Engine,
    FullConfig,
    SampledSequence,
    Sampler,
    SampleRequest,
    WeightVersion,
)
from tinsmith_runtime.errors import (
    VersionNotLoadedError,
)


def step_on(engine: Engine, run: str, seed: int) -> WeightVersion:
    engine.forward_backward(run, make_batch(seed=seed), "cross_entropy", {})
    engine.optim_step(run, AdamParams(learning_rate=0.05))
    return engine.export(run)


def in_flight(
    engine: Engine, versions: list[WeightVersion], neighbours: list[SampleRequest], **changes: Any
) -> SampledSequence:
    """Sample 12 tokens, the first 4 from one version, the next 4 from another, and so on."""
    sampler = Sampler(engine, max_sequences=16)
    for one in neighbours:
        sampler.add(one)
    request_id = sampler.add(request(weights=versions[0], follows_run=True, **changes))
    found = []
    for place in range(12):
        if place % 4 == 0:
            sampler.update(request_id, versions[place // 4])
        found += sampler.step()
    while sampler.has_work:
        found += sampler.step()
    return next(sequence for sequence in found if sequence.request_id == request_id)


@pytest.mark.parametrize("max_tokens", [4, 0])
def test_weights_without_finite_numbers_harm_nobody_else(tmp_path: Path, max_tokens: int) -> None:
    """What lies behind a sequence in its slot is multiplied by 0, and 0 times NaN is NaN."""
    engine = Engine.load(save_tiny(tmp_path, "llama"))
    broken = random_version(engine, "broken", LORA)
    engine.versions.tensors(broken).theta_P.fill_(float("nan"))
    (expected,) = run_all(Sampler(engine), request(max_tokens=8))[0]
    sampler = Sampler(engine, max_sequences=1)
    changes = {"weights": broken, "prompt_tokens": LONG[:60], "max_tokens": max_tokens}
    (failed,) = run_all(sampler, request(**changes))[0]
    assert failed.tokens == []
    (found,) = run_all(sampler, request(max_tokens=8))[0]
    assert same(found, expected)


@pytest.mark.parametrize("config", [LORA, FullConfig()], ids=["lora", "full"])
def test_newer_weights_take_effect_between_tokens(engine: Engine, config: AdapterConfig) -> None:
    versions = [random_version(engine, "run", config)]
    for seed in (1, 2):
        engine.versions.acquire(versions[-1])
        versions.append(step_on(engine, "run", seed))
    numbers = [version.version for version in versions]
    # The first step draws two tokens: the prompt is read, then decoded behind.
    wanted = [numbers[0]] * 5 + [numbers[1]] * 4 + [numbers[2]] * 3
    alone = in_flight(engine, versions, [], seed=3)
    assert alone.versions == wanted
    pinned = run_all(Sampler(engine), request(weights=versions[0], seed=3))[0][0]
    assert pinned.versions == [numbers[0]] * 12
    assert alone.tokens[:5] == pinned.tokens[:5]
    np.testing.assert_array_equal(alone.logprobs[:5], pinned.logprobs[:5])
    assert alone.logprobs[5] != pinned.logprobs[5]
    neighbours = [
        request(weights=versions[index % 3], seed=index, num_samples=1 + index, max_tokens=20)
        for index in range(4)
    ]
    assert same(in_flight(engine, versions, neighbours, seed=3), alone)
    # All holds but the test's own and the exporter's are gone.
    assert [engine.versions.num_holders(version) for version in versions] == [1, 1, 1]


def test_keys_and_values_of_earlier_tokens_stay(engine: Engine) -> None:
    versions = [random_version(engine, "run", LORA)]
    engine.versions.acquire(versions[0])
    versions.append(random_version(engine, "run", LORA, seed=8))
    found = in_flight(engine, [versions[0], versions[1], versions[1]], [], temperature=0.0)
    # A forward of the new weights over everything would give other numbers than a decode whose
    # past was written by the old ones.
    again = forward_logprobs(engine, "run", PROMPT, found.tokens)
    assert not np.allclose(found.logprobs[5:], again[5:], atol=1e-4)


@pytest.mark.parametrize("end", ["finish", "cancel", "failure"])
def test_versions_of_a_followed_run_are_held_and_let_go(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    old = random_version(engine, "run", LORA)
    sampler = Sampler(engine)
    request_id = sampler.add(request(weights=old, follows_run=True, num_samples=2))
    pinned_id = sampler.add(request(weights=old))
    sampler.step()
    assert sampler.outdated() == set()
    engine.forward_backward("run", make_batch(), "cross_entropy", {})
    engine.optim_step("run", AdamParams(learning_rate=0.02))
    assert sampler.outdated() == {old}
    new = engine.export("run")
    assert sampler.outdated() == {old}
    sampler.update(request_id, new)
    sampler.update(request_id, new)
    # One that does not follow stays as it is.
    sampler.update(pinned_id, new)
    assert sampler.outdated() == set()
    assert (engine.versions.num_holders(old), engine.versions.num_holders(new)) == (1, 2)
    sampler.cancel(pinned_id)
    assert engine.versions.held() == [new]
    if end == "cancel":
        sampler.cancel(request_id)
    elif end == "failure":
        with monkeypatch.context() as patched:
            patched.setattr(torch, "searchsorted", None)
            with pytest.raises(TypeError):
                sampler.step()
        sampler.cancel(request_id)
    while sampler.has_work:
        sampler.step()
    sampler.update(request_id, new)
    assert engine.versions.num_holders(new) == 1
    assert sampler.num_active == 0
    engine.drop_run("run")
    assert engine.versions.held() == []


def test_an_update_to_a_version_that_is_gone_changes_nothing(engine: Engine) -> None:
    gone = random_version(engine, "run", LORA)
    here = random_version(engine, "run", LORA, seed=4)
    sampler = Sampler(engine)
    request_id = sampler.add(request(weights=here, follows_run=True, seed=3))
    sampler.step()
    with pytest.raises(VersionNotLoadedError):
        sampler.update(request_id, gone)
    finished: list[SampledSequence] = []
    while sampler.has_work:
        finished += sampler.step()
    assert same(finished[0], run_all(Sampler(engine), request(weights=here, seed=3))[0][0])
