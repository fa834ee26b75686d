"""How many streams a connection may open and reset, counted in bytes that come in any pieces."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.frames import frame

from tinsmith_gateway.serving import stream_limits
from tinsmith_gateway.serving.stream_limits import FrameMeter, Passed, StreamLimits

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
    opened = reset = counted = position = index = 0
    while position < len(data):
        piece = data[position : position + sizes[index % len(sizes)]]
        passed = meter.feed(piece, math.inf, math.inf)
        assert passed.num_bytes == len(piece)
        opened += passed.num_opened
        reset += passed.num_reset
        counted += passed.num_frames
        position += passed.num_bytes
        index += 1
    kinds = [kind for kind, _, _ in frames]
    assert (opened, reset) == (kinds.count(HEADERS), kinds.count(RESET))
    assert counted == len(frames)


@given(FRAMES, st.integers(1, 60), st.integers(1, 3), st.integers(1, 4))
def test_no_more_is_passed_on_than_may_be(
    frames: list[tuple[int, bytes, int]], size: int, max_opened: int, max_frames: int
) -> None:
    """What is left over is fed again, and nothing is lost or counted twice."""
    data = b"".join(frame(kind, 0, stream, payload) for kind, payload, stream in frames)
    meter = FrameMeter()
    through, held, num_opened, num_frames = b"", data, 0, 0
    while held:
        piece, rest = held[:size], held[size:]
        passed = meter.feed(piece, max_opened, max_frames)
        assert passed.num_opened <= max_opened
        assert passed.num_frames <= max_frames
        # Bytes without a frame are always taken.
        assert passed.num_bytes or not passed.num_frames
        if not passed.num_bytes:
            passed, piece, rest = meter.feed(held, 1, 1), held, b""
        through += piece[: passed.num_bytes]
        held = piece[passed.num_bytes :] + rest
        num_opened += passed.num_opened
        num_frames += passed.num_frames
    assert through == data
    assert num_opened == [kind for kind, _, _ in frames].count(HEADERS)
    assert num_frames == len(frames)


def test_strangers_get_streams_back_as_time_passes_and_share_them_by_address() -> None:
    now_s = 0.0
    limits = StreamLimits(lambda: now_s)
    opened = Passed(num_opened=limits.num_openable("10.0.0.1:1"))
    limits.take("10.0.0.1:1", opened, is_known=False)
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


def test_frames_of_strangers_are_counted_by_address_and_others_by_connection() -> None:
    now_s = 0.0
    limits = StreamLimits(lambda: now_s)
    everything = Passed(num_frames=stream_limits.STRANGERS_FRAMES_AT_ONCE)
    limits.take("10.0.0.1:1", everything, is_known=False)
    assert limits.num_sendable("10.0.0.1:2", is_known=False) == 0
    assert limits.num_sendable("10.0.0.1:1", is_known=True) == stream_limits.FRAMES_AT_ONCE
    limits.take("10.0.0.1:1", Passed(num_frames=stream_limits.FRAMES_AT_ONCE), is_known=True)
    assert limits.num_sendable("10.0.0.1:1", is_known=True) == 0
    assert limits.num_sendable("10.0.0.1:2", is_known=True) == stream_limits.FRAMES_AT_ONCE
    now_s = 0.5
    assert limits.num_sendable("10.0.0.1:1", is_known=True) == stream_limits.FRAMES_PER_S / 2
    assert (
        limits.num_sendable("10.0.0.1:3", is_known=False)
        == stream_limits.STRANGERS_FRAMES_PER_S / 2
    )
