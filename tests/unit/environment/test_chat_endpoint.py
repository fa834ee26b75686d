"""The endpoint whose model is the player, over real HTTP."""

from __future__ import annotations

import json
import socket
import struct
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tinsmith.environments.adapters.chat_endpoint import (
    MAX_REQUEST_BYTES,
    Asked,
    ChatEndpoint,
    Refused,
)

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
SAID = {"role": "assistant", "content": "Ho"}
# A deadline for what hangs alone.
WAIT_S = 60.0


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    made = ChatEndpoint()
    yield made
    made.close()


@pytest.fixture
def caller() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def address(endpoint: ChatEndpoint) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(endpoint.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def call(url: str, body: Any = REQUEST, **headers: str) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers={"Content-Type": "x", **headers})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_call_waits_for_the_player(endpoint: ChatEndpoint, caller: ThreadPoolExecutor) -> None:
    calling = caller.submit(call, f"{endpoint.url}/chat/completions")
    asked = endpoint.next(WAIT_S)
    assert isinstance(asked, Asked)
    assert asked.request == REQUEST
    assert not calling.done()
    endpoint.answer(SAID)
    status, text = calling.result(WAIT_S)
    assert (status, json.loads(text)["choices"][0]["message"]) == (200, SAID)


def test_a_stream_has_the_answer_and_an_end(
    endpoint: ChatEndpoint, caller: ThreadPoolExecutor
) -> None:
    calling = caller.submit(call, f"{endpoint.url}/chat/completions", {**REQUEST, "stream": True})
    endpoint.next(WAIT_S)
    endpoint.answer(SAID)
    _, text = calling.result(WAIT_S)
    first, last = text.removesuffix("\n\n").split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"] == SAID
    assert last == "data: [DONE]"


def test_another_api_is_refused_by_name(endpoint: ChatEndpoint) -> None:
    status, _ = call(f"{endpoint.url}/messages")
    assert status == 404
    refused = endpoint.next(WAIT_S)
    assert isinstance(refused, Refused)
    assert "/v1/messages" in refused.problem


def test_a_call_that_is_too_long_is_refused(endpoint: ChatEndpoint) -> None:
    too_long = str(MAX_REQUEST_BYTES + 1)
    status, _ = call(f"{endpoint.url}/chat/completions", b"{}", **{"Content-Length": too_long})
    assert status == 413
    assert isinstance(endpoint.next(WAIT_S), Refused)


def test_what_is_no_request_is_refused(endpoint: ChatEndpoint) -> None:
    for body in (b"no", b"[]", b"{}"):
        assert call(f"{endpoint.url}/chat/completions", body)[0] == 400


def test_a_path_without_a_slash_is_not_found(endpoint: ChatEndpoint) -> None:
    with socket.create_connection(address(endpoint), WAIT_S) as connection:
        connection.sendall(b"POST nothing HTTP/1.0\r\n\r\n")
        assert b" 404 " in connection.recv(100)


def test_a_client_that_went_away_is_no_failure(
    endpoint: ChatEndpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(threading.enumerate())
    body = json.dumps(REQUEST).encode()
    path = f"/{endpoint.url.split('/', 3)[3]}/chat/completions"
    head = f"POST {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(address(endpoint), WAIT_S) as connection:
        connection.sendall(head.encode() + body)
        endpoint.next(WAIT_S)
        # It is reset, not ended.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    [answering] = set(threading.enumerate()) - before
    endpoint.answer(SAID)
    answering.join(WAIT_S)
    assert capfd.readouterr().err == ""


def test_calls_that_wait_end_with_the_episode(caller: ThreadPoolExecutor) -> None:
    endpoint = ChatEndpoint()
    url = f"{endpoint.url}/chat/completions"
    calling = [caller.submit(call, url) for _ in range(2)]
    endpoint.next(WAIT_S)
    endpoint.close()
    assert [each.result(WAIT_S)[0] in (404, 503) for each in calling] == [True, True]
    assert call(url)[0] == 404


def test_episodes_have_addresses_of_their_own(endpoint: ChatEndpoint) -> None:
    other = ChatEndpoint()
    assert other.url != endpoint.url
    other.close()
    with pytest.raises(RuntimeError, match="no call waits"):
        endpoint.answer(SAID)
    with pytest.raises(TimeoutError):
        endpoint.next(0.0)
