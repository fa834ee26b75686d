"""Calls that are given up while the gateway asks something on their behalf."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.gateway_harness import PROJECT, GatewayScheduler, refusal, running_gateway

from tinsmith_runtime.errors import RunNotFoundError


async def test_a_failure_that_no_call_waits_for_writes_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Names that do not exist, by clients that hang up, would else fill the log."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def get(self: GatewayScheduler, request: Any, context: Any) -> Any:
        asked.set()
        await answer.wait()
        raise RunNotFoundError("there is no such run")

    monkeypatch.setattr(GatewayScheduler, "GetTrainingRun", get)
    absent = f"projects/{PROJECT}/trainingRuns/absent"
    async with running_gateway(tmp_path) as rig:
        call = rig.get_run_status(run=absent)
        waiting = asyncio.ensure_future(_ended(call))
        await asked.wait()
        call.cancel()
        await waiting
        answer.set()
        assert (await refusal(rig.get_run_status(run=absent))).reason == "RUN_NOT_FOUND"
        del call, waiting
        gc.collect()
    assert "never retrieved" not in caplog.text


async def _ended(call: Any) -> None:
    await asyncio.gather(call, return_exceptions=True)
