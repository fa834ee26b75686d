"""The proxy that other tests rely on: it does what they say, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.faults.proxy import Fault, FaultProxy

TIMEOUT_S = 5.0


class EchoServer:
    """Answers each connection with what it sent, in capitals."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(TIMEOUT_S)
                data = connection.recv(1000)
                if data == b"end":
                    return
                while data:
                    self.received.append(data)
                    connection.sendall(data.upper())
                    data = connection.recv(1000)

    def close(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(b"end")
        self._thread.join(TIMEOUT_S)
        self._listener.close()


@pytest.fixture
def server() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.close()


@pytest.fixture
def proxy(server: EchoServer) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", server.port) as proxy:
        yield proxy
    assert not [thread for thread in threading.enumerate() if thread.name == "fault-proxy"]


def ask(proxy: FaultProxy, data: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
    """Send bytes on a new connection, and return all that comes back; empty after a reset."""
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout_s) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1000):
                answer += piece
    except OSError as error:
        # A reset may come at any moment; a connection that had one cannot be shut down any more.
        if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
            raise
    return answer


def test_without_faults_all_goes_through(proxy: FaultProxy) -> None:
    assert [ask(proxy, b"one"), ask(proxy, b"two")] == [b"ONE", b"TWO"]
    assert proxy.num_connections == 2


def test_an_outage_refuses_and_drops_what_was_open(proxy: FaultProxy, server: EchoServer) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S) as connection:
        connection.sendall(b"one")
        assert connection.recv(3) == b"ONE"
        with proxy.outage():
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
            assert ask(proxy, b"two") == b""
    assert ask(proxy, b"three") == b"THREE"
    assert server.received == [b"one", b"three"]


def test_a_request_is_cut(proxy: FaultProxy, server: EchoServer) -> None:
    proxy.add(Fault(cut_request_after=2, times=1))
    assert ask(proxy, b"one") in (b"", b"ON")
    assert ask(proxy, b"two") == b"TWO"
    assert server.received == [b"on", b"two"]


@pytest.mark.parametrize("after", [0, 2])
def test_an_answer_is_cut_after_the_server_did_its_work(
    proxy: FaultProxy, server: EchoServer, after: int
) -> None:
    proxy.add(Fault(cut_response_after=after, times=1))
    assert ask(proxy, b"one") == b"ONE"[:after]
    assert ask(proxy, b"two") == b"TWO"
    assert server.received == [b"one", b"two"]


def test_a_stall_lasts_until_it_is_lifted(proxy: FaultProxy, server: EchoServer) -> None:
    with proxy.fault(Fault(stall=True)):
        with pytest.raises(TimeoutError):
            ask(proxy, b"one", timeout_s=0.1)
        stalled = threading.Timer(0.1, proxy.clear)
        stalled.start()
        assert ask(proxy, b"two") == b""
        stalled.join()
    assert ask(proxy, b"three") == b"THREE"
    assert server.received == [b"three"]


def test_a_delay_comes_before_the_request(proxy: FaultProxy) -> None:
    proxy.add(Fault(delay_s=0.1))
    begin_s = time.monotonic()
    assert ask(proxy, b"one") == b"ONE"
    assert time.monotonic() - begin_s >= 0.1
