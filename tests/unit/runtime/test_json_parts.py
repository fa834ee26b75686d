"""Parts of a JSON body are counted outside its texts, whatever is escaped in them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith_environment.workers import protocol
from tinsmith_runtime import json_parts

TEXTS = st.text(st.sampled_from('ab"\\\\[{:,\n'), max_size=6)
VALUES = st.recursive(
    TEXTS | st.integers(), lambda one: st.lists(one) | st.dictionaries(TEXTS, one), max_leaves=20
)


def num_parts(value: object) -> int:
    if isinstance(value, list):
        return 1 + sum(map(num_parts, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(num_parts, value.values()))
    return 0


@given(VALUES, st.integers(1, 9))
def test_parts_are_those_of_the_value(value: object, step: int) -> None:
    body, count = json.dumps(value).encode(), num_parts(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_parts, "COUNTED_AT_ONCE_BYTES", step)
        assert not json_parts.has_more(body, count, json_parts.PARTS)
        if count:
            assert json_parts.has_more(body, count - 1, json_parts.PARTS)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000 + b"]" * 200_000,
        b'{"info":[' + b"[]," * protocol.MAX_PARTS + b"0]}",
        b'{"info":[' + b"0," * (protocol.MAX_VALUES + 1) + b"0]}",
        ('{"x":"\\"","y":[' + "[]," * protocol.MAX_PARTS + "0]}").encode("utf-16-le"),
    ],
    ids=["deep", "parts", "values", "another encoding"],
)
def test_a_reply_of_a_worker_is_counted_before_it_is_read(body: bytes) -> None:
    with pytest.raises(protocol.FrameError):
        protocol.decode_body(body)


def test_what_would_not_be_read_is_not_sent() -> None:
    with pytest.raises(protocol.FrameError, match="more than"):
        protocol.encode_frame({"info": {"grid": [[0]] * (protocol.MAX_PARTS + 1)}})


def test_texts_of_a_reply_may_hold_what_they_like() -> None:
    text = "[{:," * 2_000_000
    assert protocol.decode_body(json.dumps({"text": text}).encode()) == {"text": text}
