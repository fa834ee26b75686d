"""A process that is forked while a client is open is told so, and never waits for ever."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from tests.fakes.sdk_fake_server import FakeServer

import tinsmith
from tinsmith.rpc import event_loop_thread

pytestmark = [
    # The fork of a process with threads is what is tested.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


def in_a_fork(work: Callable[[], object]) -> str:
    """Return what a forked process says about some work: an error, or that it was done."""
    context = multiprocessing.get_context("fork")

    def run(sender: Connection) -> None:
        try:
            work()
            sender.send("done")
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")

    # gRPC's own handler may crash in the child before any of its code runs; then it is tried again.
    for _ in range(5):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run, args=[sender])
        process.start()
        sender.close()
        try:
            assert receiver.poll(30), "it waits for ever"
            said: str = receiver.recv()
            return said
        except EOFError:
            continue
        finally:
            process.kill()
            process.join()
    raise AssertionError("no forked process lived long enough to say anything")


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda client, run: client.runs.list(), id="call"),
        pytest.param(lambda client, run: run.optim_step(), id="operation"),
        pytest.param(lambda client, run: tinsmith.Client(client.address, "tsk_test"), id="new"),
    ],
)
def test_a_call_in_a_forked_process_is_refused(
    client: tinsmith.Client,
    run: tinsmith.TrainingRun,
    work: Callable[[Any, Any], object],
) -> None:
    said = in_a_fork(lambda: work(client, run))
    assert said.startswith("ClientClosedError: this process was forked while a Client was open")
    assert 'get_context("spawn")' in said


def test_a_result_that_is_not_there_is_not_waited_for(
    server: FakeServer,
    client: tinsmith.Client,
    run: tinsmith.TrainingRun,
    data: list[tinsmith.Datum],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = run.forward_backward(data)
    there.result(timeout=10)
    server.update(paused=True)
    pending = run.forward_backward(data)
    with monkeypatch.context() as patch:
        patch.setattr(event_loop_thread.os, "getpid", lambda: -1)
        with pytest.raises(tinsmith.ClientClosedError, match="was forked while a Client was open"):
            pending.result(timeout=10)
        assert there.result().loss > 0
    server.update(paused=False)
    assert pending.result(timeout=10).loss > 0


def test_what_a_fork_closes_stays_open_for_the_parent(
    server: FakeServer, client: tinsmith.Client
) -> None:
    assert in_a_fork(client.close) == "done"
    assert client.runs.list() is not None
    assert server.state.calls["FinishSession"] == 0
