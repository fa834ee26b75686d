"""A stream of samples goes on where it broke off, and notices what is left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from tinsmith.errors import InternalError, UnavailableError
from tinsmith.sampling.resumed_stream import ResumedStream
from tinsmith.tensors import encode_tokens
from tinsmith.v1 import sampler_pb2, trajectories_pb2

_GOES_ON = trajectories_pb2.SampledSequence.STOP_REASON_UNSPECIFIED
_STOP = trajectories_pb2.SampledSequence.STOP_REASON_STOP
_Script = list[sampler_pb2.StreamSampleResponse | Exception]


def piece(
    index: int, at: int, tokens: Sequence[int], *, ends: bool = False
) -> sampler_pb2.StreamSampleResponse:
    return sampler_pb2.StreamSampleResponse(
        sample_index=index,
        token_index=at,
        piece=trajectories_pb2.SampledSequence(
            tokens=encode_tokens(tokens), stop_reason=_STOP if ends else _GOES_ON
        ),
    )


def read(
    scripts: list[_Script], *, num_samples: int = 1
) -> tuple[list[tuple[int, int]], list[list[int]], list[Exception]]:
    """Return place of what was yielded, what each stream left out, and the failures between."""
    stream = ResumedStream(num_samples, unavailable=UnavailableError)
    asked: list[list[int]] = []
    failures: list[Exception] = []

    async def begin(
        received: Sequence[int],
    ) -> AsyncGenerator[sampler_pb2.StreamSampleResponse, None]:
        script = scripts[len(asked)]
        asked.append(list(received))
        for step in script:
            if isinstance(step, Exception):
                raise step
            yield step

    async def pause(error: Exception) -> None:
        failures.append(error)
        if not isinstance(error, UnavailableError):
            raise error

    async def run() -> list[tuple[int, int]]:
        return [
            (message.sample_index, message.token_index)
            async for message in stream.messages(begin, pause)
        ]

    found = asyncio.run(run())
    assert stream.is_complete
    return found, asked, failures


def test_what_arrived_is_left_out_of_the_next_stream() -> None:
    found, asked, failures = read(
        [
            [piece(0, 0, [1, 2]), piece(1, 0, [3], ends=True), UnavailableError("gone")],
            [piece(1, 1, [], ends=True), piece(0, 2, [4])],
            [piece(0, 3, [5], ends=True)],
        ],
        num_samples=2,
    )
    assert found == [(0, 0), (1, 0), (0, 2), (0, 3)]
    assert asked == [[0, 0], [2, 1], [3, 1]]
    assert [error.args[0] for error in failures] == [
        "gone",
        "the sampler ended a stream before its samples",
    ]


def test_a_failure_after_the_last_sample_is_none() -> None:
    found, asked, failures = read([[piece(0, 0, [1], ends=True), UnavailableError("gone")]])
    assert (found, asked, failures) == ([(0, 0)], [[0]], [])


@pytest.mark.parametrize("at", [1, 3])
def test_tokens_that_are_left_out_or_repeated_are_refused(at: int) -> None:
    with pytest.raises(InternalError, match="left out or repeated"):
        read([[piece(0, 0, [1, 2]), piece(0, at, [9], ends=True)]])


def test_newer_weights_may_end_a_sample_before_what_arrived() -> None:
    found, _, _ = read(
        [[piece(0, 0, [1, 2]), UnavailableError("gone")], [piece(0, 1, [], ends=True)]]
    )
    assert found == [(0, 0), (0, 1)]
