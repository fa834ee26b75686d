"""What one project sends leaves the sampler to the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tests.fakes.sampler_harness import (
    BASE_MODEL,
    TIMEOUT_S,
    code_of,
    refusal,
    running_sampler,
    tokens_of,
)

from tinsmith.tensors import decode_tensor
from tinsmith_engine.host import EngineHost
from tinsmith_engine.model.decoder import Decoder
from tinsmith_engine.sampling.cache.kv_cache import block_bytes


@pytest.mark.asyncio
async def test_a_project_that_fills_its_queue_leaves_that_of_others(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    async with running_sampler(
        tmp_path, engine_host, max_queued_sequences=8, max_project_queued_sequences=4, max_samples=4
    ) as rig:
        other = rig.scheduler.new_key("q")
        flooded, quiet = rig.session(), rig.session(project="q")
        with rig.engine_held():
            calls = [asyncio.ensure_future(rig.sample(flooded, num_samples=4)) for _ in range(3)]
            accepted = set(calls)
            while len(accepted) > 1:
                done, accepted = await asyncio.wait(
                    accepted, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
                )
                for call in done:
                    error = await refusal(call)
                    assert (code_of(error), error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
                    assert "4 sequences of the project wait, at most 4 may" in str(error)
            calls = [*accepted, asyncio.ensure_future(rig.sample(quiet, num_samples=4, key=other))]
            done, _ = await asyncio.wait(calls, timeout=0.2)
            assert not done
        answers = await asyncio.gather(*calls)
        assert [len(answer.sequences) for answer in answers] == [4, 4]


@pytest.mark.asyncio
async def test_the_cache_is_a_bound_that_a_caller_is_told(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    async with running_sampler(tmp_path, engine_host) as rig:
        wanted = tokens_of(await rig.sample(rig.session(), num_samples=4, max_tokens=60))
    model = engine_host.engine(BASE_MODEL).model
    assert isinstance(model, Decoder)
    num_bytes = 2 * block_bytes(model.config, torch.float32)
    async with running_sampler(tmp_path, engine_host, cache_bytes=num_bytes) as rig:
        session = rig.session()
        cut = (await rig.sample(session, [5] * 40, max_tokens=90)).sequences[0]
        assert cut.stop_reason == cut.STOP_REASON_LENGTH
        assert len(decode_tensor(cut.tokens)) == 129 - 40
        error = await refusal(rig.sample(session, [5] * 129, max_tokens=1))
        assert (code_of(error), error.reason) == ("RESOURCE_EXHAUSTED", "SEQUENCE_TOO_LONG")
        assert error.metadata["limit"] == "129"
        # They do not fit all at once: some wait, and get the same tokens.
        found = tokens_of(await rig.sample(session, num_samples=4, max_tokens=60))
        assert found == wanted
