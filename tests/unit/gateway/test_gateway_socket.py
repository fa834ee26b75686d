"""The port that everything goes through."""

from __future__ import annotations

import socket

import pytest

from tinsmith_gateway.proxy.protobuf_scan import leading_fields
from tinsmith_gateway.serving.port_multiplexer import bind
from tinsmith_runtime.errors import MalformedRequestError


def test_connections_name_their_protocol() -> None:
    # asyncio turns Nagle's algorithm off on these alone.
    with bind("127.0.0.1:0") as listener:
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", b""),
        (b"\x0a\x01x\x10\x05\x1a\xff", b"\x0a\x01x\x10\x05"),
        (b"\x1a\xff", b""),
        (b"\x0a\x01x\x15\x00\x00\x00\x00\x11" + bytes(8), None),
        (b"\x15\x0a\x01\x0a\x01\x10\x05\x1a\xff", b"\x15\x0a\x01\x0a\x01\x10\x05"),
        (b"\x10\x80\x01\x1a\xff", b"\x10\x80\x01"),
    ],
)
def test_a_message_is_cut_behind_its_leading_fields(body: bytes, expected: bytes | None) -> None:
    assert leading_fields(body, 2) == (body if expected is None else expected)


@pytest.mark.parametrize("body", [b"\x0a\x05x", b"\x0b", b"\x10", b"\x15\x00", b"\xff" * 20])
def test_leading_fields_that_are_not_whole_are_refused(body: bytes) -> None:
    with pytest.raises(MalformedRequestError):
        leading_fields(body, 2**40)
