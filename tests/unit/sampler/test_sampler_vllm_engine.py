"""The engine over vLLM, with a thread in the place of its process.

`tests/contract/sampler` has it with processes that are killed, `tests/vllm` with vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.fakes import vllm_child
from tests.fakes.vllm_child import DIE, FOLDER, GARBLE
from tests.fakes.vllm_engines import INFO, SETTINGS, TENSORS, sampled
from tests.support.wait import eventually

from tinsmith_engine import LoraConfig
from tinsmith_runtime.errors import WorkerUnavailableError
from tinsmith_sampler.vllm.engine import VllmEngine
from tinsmith_sampler.vllm.process import Interpreter, VllmProcess

WAITS_S = (1001.0, 1002.0, 1003.0)
INTERPRETER = Interpreter("no python", 1, 60.0, is_cpu=True, restart_waits_s=WAITS_S)


class ThreadChild:
    """What `asyncio` says of a process, about a thread: it ends when its connection does."""

    returncode = 0
    """Nothing is left to kill."""
    pids = itertools.count(2**30)
    """Numbers that no process has."""

    def __init__(self, connection: socket.socket) -> None:
        self.pid = next(self.pids)
        self._connection = connection
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def wait(self) -> int:
        await asyncio.to_thread(self._thread.join)
        return self.returncode

    def _run(self) -> None:
        with contextlib.suppress(SystemExit, OSError):
            vllm_child.main(self._connection)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def start(*_: str, pass_fds: Sequence[int], **__: Any) -> ThreadChild:
        return ThreadChild(socket.socket(fileno=os.dup(pass_fds[0])))

    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)


@pytest.fixture
def waits_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between two attempts to start the process, which take no time."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def noted(delay_s: float) -> None:
        if delay_s in WAITS_S:
            found.append(delay_s)
        await sleep(0 if delay_s in WAITS_S else delay_s)

    monkeypatch.setattr(asyncio, "sleep", noted)
    return found


@pytest_asyncio.fixture
async def engine(waits_s: list[float]) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(INFO, SETTINGS, INTERPRETER, stall_timeout_s=60.0)
    await engine.start()
    yield engine
    await engine.close()


async def test_a_process_that_ended_is_started_again_with_the_adapters_that_it_had(
    engine: VllmEngine, waits_s: list[float]
) -> None:
    weights = await engine.load("run", TENSORS, LoraConfig(rank=4), 5)
    before, pid = await sampled(engine, weights), engine.pid
    assert [one.tokens for one in before] == [[weights.serial] * 3] * 2
    for first in (DIE, GARBLE):
        with pytest.raises(WorkerUnavailableError):
            await sampled(engine, first=first)
        # Waits for the new process, which knows the adapter.
        after = await sampled(engine, weights)
        assert [one.tokens for one in after] == [one.tokens for one in before]
    assert engine.statistics().num_restarts == 2
    assert engine.pid != pid
    assert waits_s == [WAITS_S[0]] * 2


async def test_an_engine_that_cannot_start_again_waits_longer_each_time_and_says_so(
    engine: VllmEngine, waits_s: list[float], tmp_path: Path
) -> None:
    failures: list[bool] = []
    engine.on_failed = lambda: failures.append(True)
    (tmp_path / "broken").touch()
    with pytest.raises(WorkerUnavailableError):
        await sampled(engine, first=DIE)
    await eventually(lambda: failures)
    assert waits_s == list(WAITS_S)
    with pytest.raises(WorkerUnavailableError, match="cannot be started"):
        await sampled(engine)
    assert (engine.statistics().num_restarts, failures) == (0, [True])


def test_a_process_is_silent_since_it_was_heard_or_given_work() -> None:
    begin_s = time.monotonic()
    process = VllmProcess(INTERPRETER, SETTINGS, on_update=lambda _: None, on_end=lambda: None)
    assert process.pid == process.num_calls == 0
    assert 0 <= process.silent_s <= time.monotonic() - begin_s
    begin_s = time.monotonic()
    process.note_work()
    assert 0 <= process.silent_s <= time.monotonic() - begin_s
