"""A client process that is killed, and a new one that goes on where it was."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.lost_client import NUM_FIRST_STEPS, create_run, make_datum, submit_steps
from tests.integration.servers import TIMEOUT_S, Deployment, EmbeddedThread, weight_files

import tinsmith
from tinsmith.training.run_calls import OperationResult

MakeEmbedded = Callable[..., EmbeddedThread]
ROOT = Path(__file__).resolve().parents[2]


class LostClient:
    """The process of `lost_client`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.session = self._read()

    def go_on(self) -> None:
        """Have it send its steps."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def wait_accepted(self) -> None:
        assert self._read() == "accepted"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_S)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def lost_client(deployment: Deployment, num_steps: int) -> Iterator[LostClient]:
    arguments = [deployment.address, deployment.api_key, str(num_steps)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.lost_client", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield LostClient(process)
        finally:
            process.kill()


def shown(result: OperationResult) -> object:
    """Return a result in a form that is equal only if all bits are."""
    if isinstance(result, tinsmith.ForwardBackwardOutput):
        return [output.logprobs.tobytes() for output in result.outputs], dict(result.metrics)
    assert isinstance(result, tinsmith.OptimStepResponse)
    return result.version, dict(result.metrics)


def test_a_killed_client_is_resumed_and_nothing_differs(make_embedded: MakeEmbedded) -> None:
    server = make_embedded()
    deployment = server.start()
    with deployment.client() as client:
        calm = create_run(client)
        wanted = [shown(future.result()) for future in submit_steps(calm, range(10))]
        wanted_bits = weight_files(calm.save_state("final").result())
    with contextlib.ExitStack() as stack:
        lost = stack.enter_context(lost_client(deployment, num_steps=4))
        with server.engine_held():
            lost.go_on()
            lost.wait_accepted()
            lost.kill()
            client = stack.enter_context(deployment.client(session=lost.session))
            [run] = client.resumed_runs
            assert client.session == lost.session
            assert run.version == NUM_FIRST_STEPS
            pending = run.pending_operations
            assert [future.sequence_number for future in pending] == list(range(5, 13))
            # What comes next is queued behind them, as the client before would have done.
            later = submit_steps(run, range(6, 8))
        found = [shown(run.operation(number).result()) for number in range(1, 5)]
        found += [shown(future.result()) for future in [*pending, *later]]
        # The server may be killed as well: the session and its runs are found again.
        server.stop()
        server.start()
        again = stack.enter_context(deployment.client(session=lost.session))
        [run] = again.resumed_runs
        assert (run.version, run.pending_operations) == (8, [])
        found += [shown(future.result()) for future in submit_steps(run, range(8, 10))]
        assert found == wanted
        assert weight_files(run.save_state("final").result()) == wanted_bits


def test_a_client_that_is_killed_while_it_sends_leaves_a_run_that_goes_on(
    make_embedded: MakeEmbedded,
) -> None:
    server = make_embedded()
    deployment = server.start()
    with lost_client(deployment, num_steps=300) as lost:
        with server.engine_held():
            lost.go_on()
            with deployment.client() as other:
                [info] = other.runs.list()
                pause = threading.Event()
                while len(other.runs.get(info.name).pending_operations) < 20:
                    pause.wait(0.02)
            lost.kill()
        with deployment.client(session=lost.session) as client:
            [run] = client.resumed_runs
            # Whatever did not arrive is given up; what was accepted has a fate.
            failures = [future.exception() for future in run.pending_operations]
            gaps = [error for error in failures if error is not None]
            assert all(
                isinstance(error, tinsmith.TinsmithError) and error.reason == "SEQUENCE_GAP"
                for error in gaps
            )
            run.forward_backward([make_datum(0)]).result()
            for future in submit_steps(run, range(2)):
                with contextlib.suppress(tinsmith.FailedPreconditionError):
                    # The accumulation may lack what was lost; the step says so, once.
                    future.result()
            before = run.version
            assert before > NUM_FIRST_STEPS
            submit_steps(run, range(1))[-1].result()
            assert run.version == before + 1


def test_a_session_that_ended_can_not_be_resumed(embedded: Deployment) -> None:
    with embedded.client() as client:
        session = client.session
    with pytest.raises(tinsmith.FailedPreconditionError) as caught:
        embedded.client(session=session)
    assert caught.value.reason == "SESSION_FINISHED"
