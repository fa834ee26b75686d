"""Which model calls become one trajectory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith_coordinator.episodes.trajectories import Image, ModelCall, Trajectory, merge_calls

Piece = Sequence[int] | Image


@dataclass
class LineCount:
    """How many lines of Python ran."""

    lines: int = 0


@contextmanager
def counted_lines() -> Iterator[LineCount]:
    """Count the lines that run in this thread: work, however busy the machine is."""
    count = LineCount()

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        count.lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


RED = Image(b"red", "png")
BLUE = Image(b"blue", "png")


def call(index: int, prompt: Sequence[Piece], tokens: Sequence[int]) -> ModelCall:
    """Return a call whose log-probabilities and versions tell its tokens and its index."""
    return ModelCall(
        index=index,
        prompt=[
            piece if isinstance(piece, Image) else np.asarray(piece, dtype=np.int64)
            for piece in prompt
        ],
        tokens=np.asarray(tokens, dtype=np.int64),
        logprobs=np.asarray(tokens, dtype=np.float32) / -100,
        versions=np.full(len(tokens), index + 1, dtype=np.int64),
    )


@dataclass(frozen=True)
class Shown:
    """A trajectory as a test writes it: calls, tokens, mask, ends."""

    calls: list[int]
    tokens: list[int]
    mask: list[int]
    ends: list[int]

    @classmethod
    def of(cls, trajectory: Trajectory) -> Shown:
        return cls(
            list(trajectory.call_indices),
            trajectory.tokens.tolist(),
            [int(value) for value in trajectory.mask],
            list(trajectory.call_ends),
        )


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([call(0, [[1, 2]], [3])], [Shown([0], [3], [1], [1])], id="one"),
        pytest.param(
            [call(0, [[1, 2]], [3, 4]), call(1, [[1, 2, 3, 4, 8, 9]], [5])],
            [Shown([0, 1], [3, 4, 8, 9, 5], [1, 1, 0, 0, 1], [2, 5])],
            id="continued",
        ),
        pytest.param(
            [call(0, [[1, 2]], [3]), call(1, [[1], [2, 3]], [5])],
            [Shown([0, 1], [3, 5], [1, 1], [1, 2])],
            id="other-chunks-nothing-added",
        ),
        pytest.param(
            [call(0, [[1, 2]], [3]), call(1, [[1, 2, 7, 8]], [5])],
            [Shown([0], [3], [1], [1]), Shown([1], [5], [1], [1])],
            id="history-rewritten",
        ),
        pytest.param(
            [call(0, [[1, 2]], [3, 4]), call(1, [[1, 2, 3]], [5])],
            [Shown([0], [3, 4], [1, 1], [2]), Shown([1], [5], [1], [1])],
            id="sample-cut-off",
        ),
        pytest.param(
            [call(0, [[1]], [2]), call(1, [[1]], [3]), call(2, [[1, 3, 9]], [4])],
            [Shown([0], [2], [1], [1]), Shown([1, 2], [3, 9, 4], [1, 0, 1], [1, 3])],
            id="second-sample-goes-on",
        ),
        pytest.param(
            [call(0, [[1]], [2]), call(1, [[1]], [2]), call(2, [[1, 2]], [4])],
            [Shown([0, 2], [2, 4], [1, 1], [1, 2]), Shown([1], [2], [1], [1])],
            id="equal-samples-first-goes-on",
        ),
        pytest.param(
            [call(0, [[1]], [2]), call(1, [[1, 2, 5]], [6]), call(2, [[1, 2, 7]], [8])],
            [Shown([0, 1], [2, 5, 6], [1, 0, 1], [1, 3]), Shown([2], [8], [1], [1])],
            id="branch",
        ),
        pytest.param(
            [call(0, [[1, 2, 3, 9]], [4]), call(1, [[1, 2]], [3])],
            [Shown([1, 0], [3, 9, 4], [1, 0, 1], [1, 3])],
            id="out-of-order",
        ),
        pytest.param(
            [call(0, [[1]], [2]), call(1, [[1, 2, 3]], [4]), call(2, [[1, 2, 3, 4]], [5])],
            [Shown([0, 1, 2], [2, 3, 4, 5], [1, 0, 1, 1], [1, 3, 4])],
            id="longest-wins",
        ),
        pytest.param(
            [call(0, [[1], RED, [2]], [3]), call(1, [[1], Image(b"red", "png"), [2, 3, 9]], [4])],
            [Shown([0, 1], [3, 9, 4], [1, 0, 1], [1, 3])],
            id="same-image",
        ),
        pytest.param(
            [call(0, [[1], RED, [2]], [3]), call(1, [[1], BLUE, [2, 3, 9]], [4])],
            [Shown([0], [3], [1], [1]), Shown([1], [4], [1], [1])],
            id="other-image",
        ),
        pytest.param(
            [call(0, [[1], RED, [2]], [3]), call(1, [[1], Image(b"red", "jpeg"), [2, 3]], [4])],
            [Shown([0], [3], [1], [1]), Shown([1], [4], [1], [1])],
            id="other-format",
        ),
        pytest.param(
            [call(0, [[1, 2]], [3]), call(1, [[1, 2, 3], RED, [4]], [5])],
            [Shown([0], [3], [1], [1]), Shown([1], [5], [1], [1])],
            id="image-added-later",
        ),
        pytest.param(
            [call(0, [[1]], []), call(1, [[1, 2]], [3])],
            [Shown([0], [], [], [0]), Shown([1], [3], [1], [1])],
            id="nothing-said",
        ),
    ],
)
def test_calls_that_continue_one_another_become_one(
    calls: list[ModelCall], expected: list[Shown]
) -> None:
    assert [Shown.of(trajectory) for trajectory in merge_calls(calls)] == expected


def test_what_was_added_has_neither_probability_nor_version() -> None:
    [trajectory] = merge_calls([call(0, [[1, 2]], [3]), call(1, [[1, 2, 3, 8]], [5, 6])])
    assert [piece.tolist() for piece in trajectory.prompt if not isinstance(piece, Image)] == [
        [1, 2]
    ]
    np.testing.assert_allclose(trajectory.logprobs, [-0.03, 0, -0.05, -0.06], rtol=1e-6)
    assert trajectory.versions.tolist() == [1, 0, 2, 2]
    assert trajectory.mask.dtype == trajectory.logprobs.dtype == np.float32
    assert trajectory.tokens.dtype == trajectory.versions.dtype == np.int64


@st.composite
def conversations(draw: st.DrawFn) -> list[ModelCall]:
    """Calls of few different tokens, most of which continue an earlier one, in any order."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    texts = [draw(tokens)]
    calls = []
    for index in range(draw(st.integers(0, 8))):
        prompt = [*draw(st.sampled_from(texts)), *draw(st.lists(st.integers(0, 2), max_size=2))]
        said = draw(tokens)
        calls.append((prompt, said, index))
        texts.append([*prompt, *said])
    arrived = draw(st.permutations(calls))
    return [call(index, [prompt], said) for index, (prompt, said, _) in enumerate(arrived)]


@given(conversations())
def test_every_sampled_token_is_sampled_once(calls: list[ModelCall]) -> None:
    trajectories = merge_calls(calls)
    by_index = {each.index: each for each in calls}
    found = [index for trajectory in trajectories for index in trajectory.call_indices]
    assert sorted(found) == sorted(by_index)
    assert sum(float(trajectory.mask.sum()) for trajectory in trajectories) == sum(
        each.tokens.size for each in calls
    )
    for trajectory in trajectories:
        prompt = np.concatenate([p for p in trajectory.prompt if not isinstance(p, Image)])
        text = np.concatenate((prompt, trajectory.tokens))
        last_end = 0
        for index, end in zip(trajectory.call_indices, trajectory.call_ends, strict=True):
            said = by_index[index]
            begin = end - said.tokens.size
            # What the model read for this call, and then what it said.
            read = said.prompt[0]
            assert not isinstance(read, Image)
            np.testing.assert_array_equal(text[: prompt.size + begin], read)
            np.testing.assert_array_equal(trajectory.tokens[begin:end], said.tokens)
            np.testing.assert_array_equal(trajectory.logprobs[begin:end], said.logprobs)
            np.testing.assert_array_equal(trajectory.versions[begin:end], said.versions)
            assert np.all(trajectory.mask[begin:end] == 1)
            assert np.all(trajectory.mask[last_end:begin] == 0)
            last_end = end
        assert last_end == trajectory.tokens.size


def test_many_short_calls_take_no_work_of_their_square() -> None:
    """Each would be compared with all before it: minutes, in which a coordinator does no more."""

    def num_lines(num_calls: int) -> int:
        calls = [call(index, [[1, 2, 3]], [index]) for index in range(num_calls)]
        calls += [call(num_calls + index, [[1, 2, 3, index, 7]], [9]) for index in range(num_calls)]
        with counted_lines() as count:
            merged = merge_calls(calls)
        assert [list(one.call_indices) for one in merged] == [
            [index, num_calls + index] for index in range(num_calls)
        ]
        return count.lines

    assert num_lines(800) < 2.5 * num_lines(400)
