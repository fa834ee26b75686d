"""Frames between a sampler and vLLM: messages come back as they were, all else is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import random
import struct
from typing import Any

import pytest

from tinsmith_sampler.vllm import frames
from tinsmith_sampler.vllm.frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    FrameError,
    command_of,
    event_of,
    length_of,
    stepped_frames,
    to_frame,
)
from tinsmith_sampler.vllm.messages import (
    Abort,
    Adapter,
    AddAdapter,
    Command,
    Configure,
    Done,
    Event,
    Generate,
    Ready,
    RemoveAdapter,
    Stepped,
    Update,
)


def content_of(frame: bytes) -> bytes:
    assert length_of(frame[:LENGTH_BYTES]) == len(frame) - LENGTH_BYTES
    return frame[LENGTH_BYTES:]


def written(head: object, numbers: bytes = b"") -> bytes:
    """Return what follows the length of a frame with any head."""
    encoded = json.dumps(head).encode()
    return struct.pack(">I", len(encoded)) + encoded + numbers


def update(**changes: Any) -> Update:
    fields: dict[str, Any] = {
        "sample": 7,
        "tokens": [3, 5],
        "logprobs": [-0.1, -1e-300],
        "likeliest": [[(3, -0.1), (4, -math.inf)], []],
        "finish_reason": "length",
        "num_cached_tokens": 2,
        "prompt_logprobs": [None, -2.5],
        "prompt_likeliest": [None, [(1, -2.5)]],
    }
    return Update(**{**fields, **changes})


CONFIGURE = Configure(
    model="/models/\udcff ä",
    dtype="bfloat16",
    max_model_tokens=64,
    max_sequences=4,
    max_logprobs=5,
    cache_bytes=2**40,
    max_adapters=2,
    max_host_adapters=4,
    max_adapter_rank=8,
    tensor_parallel_size=1,
)
GENERATE = Generate(
    sample=2**62,
    prompt=[1, -(2**63), 2**63 - 1],
    max_tokens=3,
    min_tokens=0,
    temperature=0.1 + 0.2,
    top_k=-1,
    top_p=5e-324,
    seed=2**56 - 1,
    stop_tokens=[],
    num_likeliest=0,
    num_prompt_likeliest=None,
    adapter=None,
    cache_salt="",
)
COMMANDS = [
    CONFIGURE,
    GENERATE,
    dataclasses.replace(GENERATE, adapter=Adapter(3, "a", "/b"), num_prompt_likeliest=0),
    Abort([]),
    Abort([1, 2]),
    AddAdapter(1, Adapter(2, "name", "folder")),
    RemoveAdapter(1, 2),
]
EVENTS = [
    Ready("0.32.0", 64),
    Done(1),
    Done(2, 'no "adapter"\n'),
    Stepped([]),
    Stepped([update(), update(prompt_logprobs=None, prompt_likeliest=None, finish_reason=None)]),
    Stepped([update(tokens=[], logprobs=[], likeliest=[], prompt_logprobs=[], problem="why")]),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_comes_back_as_it_was(command: Command) -> None:
    assert command_of(content_of(to_frame(command))) == command


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    assert event_of(content_of(to_frame(event))) == event


def test_what_is_no_number_stays_so() -> None:
    event = event_of(content_of(to_frame(Stepped([update(logprobs=[math.nan, -math.inf])]))))
    assert isinstance(event, Stepped)
    assert math.isnan(event.updates[0].logprobs[0])
    assert event.updates[0].logprobs[1] == -math.inf


def test_each_end_takes_only_messages_for_it() -> None:
    with pytest.raises(FrameError, match="none of Ready, Done, Stepped"):
        event_of(content_of(to_frame(Abort([1]))))
    with pytest.raises(FrameError, match="none of Configure"):
        command_of(content_of(to_frame(Done(1))))


def test_a_frame_that_was_cut_or_goes_on_is_refused() -> None:
    content = content_of(to_frame(Stepped([update()])))
    for end in range(len(content)):
        with pytest.raises(FrameError):
            event_of(content[:end])
    with pytest.raises(FrameError):
        event_of(content + b"\x00")


def test_bytes_that_were_changed_make_an_event_or_a_typed_error() -> None:
    content = content_of(to_frame(Stepped([update()])))
    generator = random.Random(0)
    num_refused = 0
    for _ in range(3000):
        changed = bytearray(content)
        for _ in range(generator.randint(1, 4)):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        try:
            assert isinstance(event_of(bytes(changed)), Ready | Done | Stepped)
        except FrameError:
            num_refused += 1
    assert num_refused > 1000


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x00\x00", id="half-a-length"),
        pytest.param(pickle.dumps(Done(1)), id="pickle"),
        pytest.param(struct.pack(">I", 2**31) + b"[]", id="head-beyond-the-bound"),
        pytest.param(struct.pack(">I", 3) + b"[]", id="head-beyond-the-frame"),
        pytest.param(struct.pack(">I", 2) + b"[x", id="no-json"),
        pytest.param(struct.pack(">I", 2) + b"\xff\xfe", id="no-ascii"),
        pytest.param(struct.pack(">I", 200_000) + b"[" * 200_000, id="deep"),
        pytest.param(written({}), id="an-object"),
        pytest.param(written(["Done"]), id="no-fields"),
        pytest.param(written([["Done"], [1, ""]]), id="a-list-as-name"),
        pytest.param(written(["__class__", [1, ""]]), id="another-name"),
        pytest.param(written(["Done", {"call": 1, "problem": ""}]), id="fields-by-name"),
        pytest.param(written(["Done", [1]]), id="a-field-is-missing"),
        pytest.param(written(["Done", [1, "", 2]]), id="a-field-too-many"),
        pytest.param(written(["Done", ["1", ""]]), id="text-as-integer"),
        pytest.param(written(["Done", [True, ""]]), id="true-as-integer"),
        pytest.param(written(["Done", [1.0, ""]]), id="float-as-integer"),
        pytest.param(written(["Done", [1, None]]), id="none-as-text"),
        pytest.param(written(["Done", [1, ""]], b"\x00"), id="numbers-too-many"),
        pytest.param(written(["Stepped", [3]]), id="no-list-of-updates"),
        pytest.param(
            written(["Stepped", [[[7, 2**60, 0, 0, None, 0, None, None, ""]]]]), id="huge-count"
        ),
        pytest.param(
            written(["Stepped", [[[7, -1, 0, 0, None, 0, None, None, ""]]]]), id="negative-count"
        ),
        pytest.param(
            written(
                ["Stepped", [[[7, 0, 0, 1, None, 0, None, None, ""]]]], struct.pack("=q", 2**62)
            ),
            id="huge-row",
        ),
        pytest.param(
            written(["Stepped", [[[7, 0, 0, 1, None, 0, None, None, ""]]]], struct.pack("=q", -1)),
            id="none-where-a-row-belongs",
        ),
    ],
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    with pytest.raises(FrameError):
        event_of(content)


def test_a_frame_is_refused_by_its_length_before_it_is_read() -> None:
    assert length_of(struct.pack(">Q", MAX_FRAME_BYTES)) == MAX_FRAME_BYTES
    with pytest.raises(FrameError, match="allowed"):
        length_of(struct.pack(">Q", MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(Done(1, 2), id="no-text"),  # type: ignore[arg-type]
        pytest.param(Abort([2**63]), id="an-integer-of-65-bits"),
        pytest.param(Abort(["1"]), id="text-in-a-list"),  # type: ignore[list-item]
        pytest.param(Stepped([None]), id="no-update"),  # type: ignore[list-item]
    ],
)
def test_what_has_no_frame_is_not_sent(message: Any) -> None:
    with pytest.raises(FrameError, match="has no frame"):
        to_frame(message)


def test_a_step_beyond_the_bound_is_told_by_completion_and_one_beyond_it_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = update(), update(sample=8, tokens=[1] * 400)
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 2000)
    [together] = stepped_frames([small, small])
    assert event_of(content_of(together)) == Stepped([small, small])
    first, second, third = map(event_of, map(content_of, stepped_frames([small, large, small])))
    assert first == third == Stepped([small])
    assert isinstance(second, Stepped)
    [refused] = second.updates
    assert (refused.sample, refused.tokens) == (8, [])
    assert "2000" in refused.problem
