"""Stop strings over a real channel: their greatest length, and a sample that ends at one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.sampler_harness import code_of, refusal, running_sampler

from tinsmith_engine.host import EngineHost
from tinsmith_runtime.text.stop_strings import MAX_STOP_CHARACTERS


@pytest.mark.asyncio
async def test_the_length_of_stop_strings_is_bounded(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    async with running_sampler(tmp_path, engine_host) as rig:
        session = rig.session()
        longest = "x" * MAX_STOP_CHARACTERS
        await rig.sample(session, stop_strings=["a", longest])
        error = await refusal(rig.sample(session, stop_strings=["a", longest + "x"]))
        assert (code_of(error), error.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert "at most 256 characters, got one of 257" in str(error)
        assert "params.stop_strings" in str(error)
