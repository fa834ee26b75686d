"""How many streams a connection may open and reset, counted in bytes that come in any pieces."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.frames import frame

from tinsmith_gateway.serving import stream_limits
from tinsmith_gateway.serving.stream_limits import FrameMeter, StreamLimits

HEADERS, RESET = 1, 3
FRAMES = st.lists(
    st.tuples(st.integers(0, 11), st.binary(max_size=40), st.integers(0, 2**31 - 1)), max_size=30
)


@given(FRAMES, st.lists(st.integers(1, 60), min_size=1, max_size=10))
def test_frames_are_counted_however_they_are_cut(
    frames: list[tuple[int, bytes, int]], sizes: list[int]
) -> None:
    data = b"".join(frame(kind, 0, stream, payload) for kind, payload, stream in frames)
    meter = FrameMeter()
    opened = reset = position = index = 0
    while position < len(data):
        piece = data[position : position + sizes[index % len(sizes)]]
        taken, more_opened, more_reset = meter.feed(piece, math.inf)
        assert taken == len(piece)
        opened, reset, position, index = (
            opened + more_opened,
            reset + more_reset,
            position + taken,
            index + 1,
        )
    kinds = [kind for kind, _, _ in frames]
    assert (opened, reset) == (kinds.count(HEADERS), kinds.count(RESET))


@given(FRAMES, st.integers(1, 60), st.integers(1, 3))
def test_no_more_streams_are_passed_on_than_may_be_opened(
    frames: list[tuple[int, bytes, int]], size: int, at_once: int
) -> None:
    """What is left over is fed again, and nothing is lost or counted twice."""
    data = b"".join(frame(kind, 0, stream, payload) for kind, payload, stream in frames)
    meter = FrameMeter()
    passed, held, num_opened = b"", data, 0
    while held:
        piece, rest = held[:size], held[size:]
        taken, opened, _ = meter.feed(piece, at_once)
        assert opened <= at_once
        # Bytes without a frame that opens are always taken.
        assert taken or opened == 0
        passed += piece[:taken]
        held = piece[taken:] + rest
        num_opened += opened
        if taken == 0:
            # The next one may be opened now.
            taken, opened, _ = meter.feed(held, 1)
            passed, held, num_opened = passed + held[:taken], held[taken:], num_opened + opened
    assert passed == data
    assert num_opened == [kind for kind, _, _ in frames].count(HEADERS)


def test_strangers_get_streams_back_as_time_passes_and_share_them_by_address() -> None:
    now_s = 0.0
    limits = StreamLimits(lambda: now_s)
    limits.take_opened("10.0.0.1:1", limits.num_openable("10.0.0.1:1"))
    assert limits.num_openable("10.0.0.1:2") == 0
    assert limits.num_openable("10.0.0.2:1") == stream_limits.STRANGERS_STREAMS_AT_ONCE
    now_s = 2.0
    assert limits.num_openable("10.0.0.1:3") == 2 * stream_limits.STRANGERS_STREAMS_PER_S


def test_who_showed_a_good_key_may_cancel_all_that_it_may_have_in_flight() -> None:
    limits = StreamLimits(lambda: 0.0)
    number = stream_limits.RESETS_AT_ONCE
    assert limits.take_resets("10.0.0.1:1", number, is_known=True)
    assert not limits.take_resets("10.0.0.1:1", 1, is_known=True)
    assert limits.take_resets("10.0.0.1:2", number, is_known=True)
    assert limits.take_resets("10.0.0.1:1", stream_limits.STRANGERS_RESETS_AT_ONCE, is_known=False)
    assert not limits.take_resets("10.0.0.1:2", 1, is_known=False)
