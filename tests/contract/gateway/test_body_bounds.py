"""Bodies of HTTP requests: how large, how slow, and what else runs while one is parsed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.gateway_harness import GatewayRig, running_gateway
from tests.fakes.held_protocol import Protocol, connect, headers, until_closed

from tinsmith_gateway.endpoint import MAX_JSON_PARTS, MAX_JSON_VALUES, parse_json
from tinsmith_gateway.openai.bodies import MAX_MESSAGES, MAX_TOOLS, ChatBody, CompletionBody
from tinsmith_gateway.tinker.wire.bodies import Sample
from tinsmith_runtime.errors import BatchTooLargeError, InvalidFieldError, MalformedRequestError

TEXT_BYTES, PAUSE_S = 4 * 2**20, 0.05
NO_BATCH = [
    *(f"/api/v1/{path}" for path in ("telemetry", "optim_step", "save_weights", "load_weights")),
    *(f"/api/v1/save_weights_{path}" for path in ("for_sampler", "external")),
    *("/register_episode", "/claim_episode", "/submit_episode", "/abort_episode"),
    "/v1/chat/completions",
]
ECHO = "POST /echo HTTP/1.1\r\nhost: x\r\nx-api-key: {}\r\ncontent-length: {}\r\n\r\n"


@pytest.mark.parametrize("path", NO_BATCH)
async def test_what_holds_no_batch_is_small(tmp_path: Path, path: str) -> None:
    async with (
        running_gateway(tmp_path) as rig,
        httpx.AsyncClient(base_url=f"http://{rig.gateway.address}", headers=headers(rig)) as http,
    ):
        answer = await http.post(path, content=b" " * (TEXT_BYTES + 1))
        assert answer.status_code == 400
        assert f"larger than {TEXT_BYTES} bytes" in answer.text
        answer = await http.post(path, content=b" " * TEXT_BYTES)
        assert "larger than" not in answer.text


async def test_a_route_without_a_key_takes_no_body(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path) as rig,
        httpx.AsyncClient(base_url=f"http://{rig.gateway.address}") as http,
    ):
        for path in ("/api/v1/downloads/x", "/api/v1/downloads/traces/x"):
            answer = await http.request("GET", path, content=b" " * 2000)
            assert answer.status_code == 400
            assert "larger than 1024 bytes" in answer.text


def _chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user"}], **fields}).encode()


def test_a_conversation_has_so_many_messages_and_tools() -> None:
    message = {"role": "user", "content": "a"}
    tool = {"type": "function", "function": {"name": "f"}}
    parse_json(_chat(messages=[message] * MAX_MESSAGES, tools=[tool] * MAX_TOOLS), ChatBody)
    with pytest.raises(InvalidFieldError, match="messages"):
        parse_json(_chat(messages=[message] * (MAX_MESSAGES + 1)), ChatBody)
    with pytest.raises(InvalidFieldError, match="tools"):
        parse_json(_chat(tools=[tool] * (MAX_TOOLS + 1)), ChatBody)


def test_a_body_has_so_many_values() -> None:
    chunk = b'{"type":"encoded_text","tokens":[%s]}'
    body = b'{"num_samples":1,"sampling_params":{},"sampling_session_id":"x","seq_id":1,"prompt":'
    body += b'{"chunks":[' + chunk % b",".join([b"1"] * (MAX_JSON_VALUES + 1)) + b"]}}"
    with pytest.raises(BatchTooLargeError, match="in parts") as caught:
        parse_json(body, Sample)
    assert caught.value.metadata == {"limit": str(MAX_JSON_VALUES)}


@pytest.mark.parametrize(
    "settings",
    [{"min_body_bytes_per_s": 1000}, {"body_deadline_s": 0.6, "min_body_bytes_per_s": 1}],
    ids=["rate", "deadline"],
)
async def test_a_body_that_trickles_is_given_up(
    tmp_path: Path, protocol: Protocol, settings: dict[str, Any]
) -> None:
    """A byte comes before each pause is over, for ever."""
    async with running_gateway(tmp_path, body_timeout_s=0.5, **settings) as rig:
        reader, writer = await _begin(rig, 10**6)
        trickle = asyncio.create_task(_trickle(writer))
        answer = await until_closed(reader)
        trickle.cancel()
        assert answer.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_body_that_is_slow_and_steady_arrives(tmp_path: Path, protocol: Protocol) -> None:
    async with running_gateway(
        tmp_path, body_timeout_s=20.0, min_body_bytes_per_s=1000, body_deadline_s=60.0
    ) as rig:
        reader, writer = await _begin(rig, 20)
        for _ in range(20):
            writer.write(b"a")
            await asyncio.sleep(PAUSE_S)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(20) == b"a" * 20
        writer.close()


async def _begin(rig: GatewayRig, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await connect(rig)
    writer.write(ECHO.format(rig.key, size).encode())
    return reader, writer


async def _trickle(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"a")
        await asyncio.sleep(PAUSE_S)


@pytest.mark.parametrize("part", ["[]", "{}", '"a":0'])
def test_a_body_of_many_small_parts_is_refused_before_it_is_parsed(part: str) -> None:
    inner = ",".join([part] * (MAX_JSON_PARTS + 1))
    body = f'{{"model":[{inner}]}}' if part != '"a":0' else f'{{"model":{{{inner}}}}}'
    with pytest.raises(BatchTooLargeError) as caught:
        parse_json(body.encode(), CompletionBody)
    assert caught.value.metadata == {"limit": str(MAX_JSON_PARTS)}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"null", "Input should be an object"),
        (b'{"model": "tiny", "prompt": "a", "stream_options": [1]}', "Input should be an object"),
    ],
)
def test_a_refusal_speaks_of_json(body: bytes, said: str) -> None:
    with pytest.raises(InvalidFieldError, match=said):
        parse_json(body, CompletionBody)


def test_brackets_and_colons_within_texts_are_no_parts() -> None:
    text = '[{"a\\": 1}, ' * MAX_JSON_PARTS
    body = json.dumps({"model": "tiny", "prompt": text})
    assert parse_json(body.encode(), CompletionBody).prompt == text


def test_a_text_that_never_ends_is_looked_through_once() -> None:
    """Each of its million escaped quotes could begin another text."""
    body = b'{"model":"' + b'\\"[' * 10**6
    with pytest.raises(MalformedRequestError):
        parse_json(body, CompletionBody)
