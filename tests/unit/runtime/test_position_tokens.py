"""Tokens of lists in the order of time: bound to their list, and checked when they are read."""

from __future__ import annotations

import pytest

from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.rpc.requests import (
    decode_position_token,
    encode_key_token,
    encode_position_token,
    parse_serial,
)

LIST = "projects/p/checkpointEvents"


@pytest.mark.parametrize("time_s", [0.0, 1763889301.123457, 1e-9])
def test_a_position_comes_back_exactly(time_s: float) -> None:
    token = encode_position_token(LIST, time_s, "projects/p:odd/name")
    assert decode_position_token(LIST, token) == (time_s, "projects/p:odd/name")
    assert decode_position_token(LIST, "") is None


@pytest.mark.parametrize(
    "token",
    [
        pytest.param("1763889301.1:7", id="bare"),
        pytest.param(encode_position_token("projects/q/checkpointEvents", 1.0, "7"), id="foreign"),
        pytest.param(encode_key_token(LIST, "yesterday:7"), id="forged"),
    ],
)
def test_another_token_is_refused_with_what_to_do(token: str) -> None:
    with pytest.raises(InvalidFieldError, match="start without one"):
        decode_position_token(LIST, token)


@pytest.mark.parametrize("key", ["", "-1", "9" * 19, "x"])
def test_a_serial_is_a_number_that_a_database_holds(key: str) -> None:
    with pytest.raises(InvalidFieldError, match="page_token"):
        parse_serial(key)
