"""What a sampler does about the process of its engine: real processes, without vLLM in them.

`tests/vllm` has the same engine with the real one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tests.fakes.vllm_child import DIE, FOLDER, GARBLE
from tests.fakes.vllm_engines import INFO, SETTINGS, TENSORS, sampled
from tests.support.wait import eventually

from tinsmith_engine import FullConfig, LoraConfig, SampleRequest
from tinsmith_runtime.errors import (
    CheckpointIncompatibleError,
    InvalidFieldError,
    VersionNotLoadedError,
    WorkerUnavailableError,
)
from tinsmith_runtime.text.penalties import Shaping
from tinsmith_sampler.vllm.engine import VllmEngine
from tinsmith_sampler.vllm.process import Interpreter

LORA = LoraConfig(rank=4)


@pytest.fixture
def stall_timeout_s() -> float:
    return 60.0


@pytest_asyncio.fixture
async def engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stall_timeout_s: float
) -> AsyncIterator[VllmEngine]:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, [str(Path.cwd()), *sys.path])))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.fakes.vllm_child "$3"\n')
    python.chmod(0o755)
    engine = VllmEngine(
        INFO,
        SETTINGS,
        Interpreter(str(python), 1, 60.0, is_cpu=True, restart_waits_s=(0.0, 0.01)),
        stall_timeout_s=stall_timeout_s,
    )
    await engine.start()
    yield engine
    await engine.close()


async def test_a_process_that_ended_is_started_again_with_the_adapters_that_it_had(
    engine: VllmEngine,
) -> None:
    weights = await engine.load("run", TENSORS, LORA, 5)
    before = await sampled(engine, weights)
    assert [one.tokens for one in before] == [[weights.serial] * 3] * 2
    assert [one.versions for one in before] == [[5, 5, 5]] * 2
    with pytest.raises(WorkerUnavailableError):
        await sampled(engine, first=DIE)
    # Waits for the new process, which knows the adapter.
    after = await sampled(engine, weights)
    assert [one.tokens for one in after] == [one.tokens for one in before]
    assert engine.statistics().num_restarts == 1
    assert engine.statistics().num_requests == 0


async def test_a_process_that_is_not_understood_is_started_again(
    engine: VllmEngine, tmp_path: Path
) -> None:
    pid = engine.pid
    with pytest.raises(WorkerUnavailableError):
        await sampled(engine, first=GARBLE)
    assert [one.tokens for one in await sampled(engine)] == [[0] * 3] * 2
    assert (engine.statistics().num_restarts, engine.pid == pid) == (1, False)
    # As one of another release would be from its first word.
    (tmp_path / "garbled").touch()
    with pytest.raises(WorkerUnavailableError):
        await sampled(engine, first=DIE)
    with pytest.raises(WorkerUnavailableError, match="cannot be started"):
        await sampled(engine)


@pytest.mark.parametrize("stall_timeout_s", [3.0])
async def test_a_process_that_stalls_over_weights_is_started_again(engine: VllmEngine) -> None:
    """Nothing is sampled meanwhile: a call without an answer is work too."""
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(WorkerUnavailableError):
        await engine.load("run", TENSORS, LORA, 5)
    await eventually(lambda: engine.statistics().num_restarts)
    assert engine.held() == []


async def test_an_engine_that_cannot_start_again_says_so_and_refuses(
    engine: VllmEngine, tmp_path: Path
) -> None:
    failures: list[bool] = []
    engine.on_failed = lambda: failures.append(True)
    (tmp_path / "broken").touch()
    with pytest.raises(WorkerUnavailableError):
        await sampled(engine, first=DIE)
    await eventually(lambda: failures)
    with pytest.raises(WorkerUnavailableError, match="cannot be started"):
        await sampled(engine)
    assert failures == [True]


async def test_a_version_goes_with_its_successor_or_with_its_last_request(
    engine: VllmEngine,
) -> None:
    first = await engine.load("run", TENSORS, LORA, 1)
    second = await engine.load("run", TENSORS, LORA, 2)
    assert [one.handle for one in engine.held()] == [second]
    with pytest.raises(VersionNotLoadedError):
        await sampled(engine, first)
    await engine.unload("run")
    assert engine.held() == []


async def test_no_id_is_used_for_two_versions(engine: VllmEngine) -> None:
    serials = [(await engine.load("run", TENSORS, LORA, 1)).serial for _ in range(5)]
    assert len(set(serials)) == 5


async def test_full_weights_are_refused_by_name(engine: VllmEngine) -> None:
    with pytest.raises(CheckpointIncompatibleError, match="engine vllm"):
        await engine.load("full", {"w": torch.ones(2)}, FullConfig(), 9)
    assert engine.held() == []


@pytest.mark.parametrize(
    ("shaping", "name"),
    [
        (Shaping(frequency_penalty=0.5), "frequency_penalty"),
        (Shaping(repetition_penalty=1.1, logit_bias={1: 2.0}), "repetition_penalty"),
        (Shaping(logit_bias={1: 2.0}), "logit_bias"),
    ],
)
async def test_what_shapes_logits_is_refused_by_its_own_name(
    engine: VllmEngine, shaping: Shaping, name: str
) -> None:
    request = SampleRequest(prompt_tokens=[1], max_tokens=1, shaping=shaping)
    with pytest.raises(InvalidFieldError, match=f"{name} cannot be done by engine vllm"):
        engine.refuse(request)
    assert name in engine.capabilities.refused


async def test_shaping_that_changes_nothing_is_taken(engine: VllmEngine) -> None:
    engine.refuse(SampleRequest(prompt_tokens=[1], max_tokens=1, shaping=Shaping()))
