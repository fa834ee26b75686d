"""Which version a sample is of: too old ones are refused, and no cache brings old weights back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.sampler_harness import (
    SamplerRig,
    code_of,
    refusal,
    tokens_of,
    versions_of,
)

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import sampler_pb2
from tinsmith_engine.host import EngineHost

PROMPT = [5, 6, 7, 8] * 40
"""Several blocks of the cache of keys and values."""


@pytest.fixture
async def rig(tmp_path: Path, engine_host: EngineHost) -> AsyncIterator[SamplerRig]:
    rig = SamplerRig(tmp_path / "store", engine_host)
    await rig.start()
    yield rig
    await rig.stop()


def of(rig: SamplerRig, session: str, max_staleness: int, min_version: int) -> Any:
    extras = {"max_staleness": max_staleness}
    return rig.sample(session, min_version=min_version, extras=extras)


async def test_weights_that_are_not_too_old_serve_while_the_trainer_is_away(
    rig: SamplerRig,
) -> None:
    run = await rig.export("stale", seed=1, version=5)
    session = rig.session(run=run)
    fresh = await of(rig, session, 0, 5)
    await rig.trainer.server.stop()
    for max_staleness, min_version in ((1, 5), (1, 6), (3, 8)):
        answer = await of(rig, session, max_staleness, min_version)
        assert (tokens_of(answer), versions_of(answer)) == (tokens_of(fresh), {5})
        assert answer.version == 5
    for max_staleness, min_version in ((1, 7), (3, 9)):
        error = await refusal(of(rig, session, max_staleness, min_version))
        assert (code_of(error), error.reason) == ("UNAVAILABLE", "VERSION_NOT_LOADED")
    error = await refusal(of(rig, session, 0, 5))
    assert (code_of(error), error.reason) == ("UNAVAILABLE", "WORKER_UNAVAILABLE")


async def test_while_the_trainer_answers_the_newest_serve(rig: SamplerRig) -> None:
    run = await rig.export("newest", seed=1, version=1)
    session = rig.session(run=run)
    assert versions_of(await of(rig, session, 5, 1)) == {1}
    await rig.export("newest", seed=2, version=2)
    assert versions_of(await of(rig, session, 5, 1)) == {2}
    # The run went back: what it was at later is not its any more.
    await rig.export("newest", seed=1, version=1)
    assert versions_of(await of(rig, session, 5, 2)) == {1}
    error = await refusal(of(rig, session, 0, 2))
    assert error.reason == "VERSION_NOT_LOADED"


async def test_weights_of_a_run_that_is_gone_serve_nothing(rig: SamplerRig) -> None:
    run = await rig.export("gone", seed=1, version=1)
    session = rig.session(run=run)
    await of(rig, session, 5, 1)
    del rig.trainer.exported[run]
    error = await refusal(of(rig, session, 5, 1))
    assert (code_of(error), error.reason) == ("NOT_FOUND", "RUN_NOT_FOUND")


async def test_a_staleness_below_nothing_is_refused(rig: SamplerRig) -> None:
    error = await refusal(of(rig, rig.session(), -1, 0))
    assert (code_of(error), error.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_a_prompt_that_is_known_of_other_weights_is_computed_anew(rig: SamplerRig) -> None:
    """Versions come, go and come again under one prompt; each gives the bits that it gave cold."""
    cold: dict[int, tuple[object, ...]] = {}
    for seed in (1, 2, 3):
        # Each of a run of its own, with nothing cached.
        session = rig.session(run=await rig.export(f"alone-{seed}", seed=seed, version=1))
        answer = await ask(rig, session)
        assert answer.num_cached_prompt_tokens == 0
        cold[seed] = content(answer)
    assert len(set(cold.values())) == 3

    random = np.random.default_rng(7)
    run = await rig.export("attacked", seed=1, version=1)
    session = rig.session(run=run)
    running: list[tuple[int, asyncio.Task[sampler_pb2.SampleResponse]]] = []
    num_cached = 0
    for _ in range(40):
        seed, version = int(random.integers(1, 4)), int(random.integers(1, 3))
        # The same number for other weights, other numbers for the same, also while some decode.
        await rig.export("attacked", seed=seed, version=version)
        # One request at least has the prompt in the cache before the next weights come.
        for answer in (await ask(rig, session), await ask(rig, session)):
            assert (content(answer), versions_of(answer)) == (cold[seed], {version})
            num_cached += answer.num_cached_prompt_tokens
        running.append((seed, asyncio.ensure_future(ask(rig, session))))
        await asyncio.sleep(0)
    for wanted, task in running:
        # They resolve their weights when they arrive, which may be after the next export.
        assert content(await task) in cold.values(), wanted
    assert num_cached > 0


def ask(rig: SamplerRig, session: str) -> Any:
    return rig.sample(session, PROMPT)


def content(answer: sampler_pb2.SampleResponse) -> tuple[object, ...]:
    """Return the bits of an answer that depend on the weights."""
    (sequence,) = answer.sequences
    return (
        tuple(decode_tensor(sequence.tokens).tolist()),
        decode_tensor(sequence.logprobs).tobytes(),
    )
