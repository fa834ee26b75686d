"""Calls to a worker: what runs environments there, and the channel that its replies come on."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.fakes.pictures import picture
from tests.support.wait import eventually

from tinsmith.environments.environment import Image
from tinsmith_environment import Action, Environment, Observation, StepResult
from tinsmith_environment.environment import InvalidActionError, InvalidSettingError
from tinsmith_environment.workers import protocol
from tinsmith_environment.workers.frame_channel import ChannelClosedError, FrameChannel
from tinsmith_environment.workers.process import WorkerLoop

HERE = __name__


class Counting(Environment):
    """Counts up to a goal.

    It has more to say.
    """

    default_config: ClassVar[dict[str, Any]] = {"goal": 3}
    closed: ClassVar[list[int]] = []

    def __init__(self, step: int = 1) -> None:
        self._step, self._count = step, 0

    def reset(self, seed: int, config: Any) -> Observation:
        if config.get("goal", 1) < 1:
            raise InvalidSettingError("goal", "must be positive")
        self._count = seed
        return Observation.of_user(f"at {seed}")

    def step(self, action: Action) -> Any:
        match action.text:
            case "exit":
                raise SystemExit(3)
            case "refuse":
                raise InvalidActionError("is refused")
            case "wrong":
                return "no result"
        self._count += self._step
        observation = Observation.of_user(f"at {self._count}")
        return StepResult(observation, 0.5, done=False, info={"n": np.int64(self._count)})

    def close(self) -> None:
        self.closed.append(self._count)


def answer(loop: WorkerLoop, **request: Any) -> dict[str, Any]:
    """Return the reply to a request."""
    frame = loop.answer(request)
    size = protocol.HEADER.size
    assert protocol.decode_length(frame[:size]) == len(frame) - size
    return protocol.decode_body(frame[size:])


def create(loop: WorkerLoop, instance: str = "i", **fields: Any) -> dict[str, Any]:
    path = f"{HERE}:Counting"
    given = {"class_path": path, "settings": {}, "seed": 5, "config": {}, **fields}
    return answer(loop, op="create", instance=instance, **given)


def step(loop: WorkerLoop, text: str = "go", instance: str = "i") -> dict[str, Any]:
    action = protocol.encode_action(Action(text=text))
    return answer(loop, op="step", instance=instance, action=action)


def test_a_class_says_what_it_is() -> None:
    assert answer(WorkerLoop(), op="describe", class_path=f"{HERE}:Counting") == {
        "ok": True,
        "description": "Counts up to a goal.",
        "default_config": {"goal": 3},
        "action_kinds": ["text"],
    }
    for path, problem in (
        (f"{HERE}:answer", "TypeError"),
        (f"{HERE}:Missing", "AttributeError"),
        ("no_such_module:A", "ModuleNotFoundError"),
    ):
        told = answer(WorkerLoop(), op="describe", class_path=path)
        assert (told["ok"], told["kind"]) == (False, "failed")
        assert told["message"].startswith(problem)


def test_instances_are_played_beside_each_other_and_closed() -> None:
    loop = WorkerLoop()
    created = create(loop)
    assert (created["ok"], created["action_kinds"]) == (True, ["text"])
    observation = protocol.decode_observation(created["observation"])
    assert observation.messages[0].content == "at 5"
    create(loop, "other", settings={"step": 10})
    results = [
        protocol.decode_result(step(loop, instance=instance)["result"])
        for instance in ("i", "other", "i")
    ]
    assert [each.info["n"] for each in results] == [6, 15, 7]
    assert (results[0].reward, results[0].done) == (0.5, False)
    Counting.closed.clear()
    for _ in range(2):
        assert answer(loop, op="close", instance="i") == {"ok": True}
    assert Counting.closed == [7]
    assert step(loop)["kind"] == "failed"
    assert step(loop, instance="other")["ok"]


def test_what_is_refused_names_its_field_and_changes_nothing() -> None:
    loop = WorkerLoop()
    told = create(loop, config={"goal": 0})
    assert told == {
        "ok": False,
        "kind": "invalid",
        "field": "config.goal",
        "problem": "must be positive",
    }
    assert step(loop)["kind"] == "failed"
    create(loop)
    assert step(loop, "refuse") == {
        "ok": False,
        "kind": "invalid",
        "field": "action",
        "problem": "is refused",
    }
    tokens = protocol.encode_action(Action(tokens=(1, 2)))
    told = answer(loop, op="step", instance="i", action=tokens)
    assert (told["kind"], told["field"]) == ("invalid", "action")
    assert protocol.decode_result(step(loop)["result"]).info["n"] == 6


def test_an_environment_that_fails_takes_no_other_along() -> None:
    loop = WorkerLoop(max_reply_bytes=2_000)
    create(loop)
    told = step(loop, "exit")
    assert (told["ok"], told["kind"], told["message"]) == (False, "failed", "SystemExit: 3")
    assert told["where"].startswith("test_worker_calls.py:")
    assert step(loop, "wrong")["message"].startswith("FrameError: expected a StepResult")
    assert answer(loop, op="dance")["message"] == "ValueError: unknown operation 'dance'"
    # A reply has a largest size, and so has a message of a failure.
    assert not create(loop, "long", config={"goal": "x" * 5_000})["ok"]
    assert len(create(loop, class_path=f"{HERE}:{'A' * 5_000}")["message"]) == 500
    assert step(loop)["ok"]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (StepResult(Observation(()), "1", done=False), "reward must be a number"),  # type: ignore[arg-type]
        (StepResult(Observation(()), math.nan, done=False), "reward must be finite"),
        (StepResult(Observation(()), 10**400, done=False), "that no float holds"),
        (StepResult(Observation(()), 1.0, done=1), "done must be True or False"),  # type: ignore[arg-type]
        (StepResult("text", 1.0, done=True), "expected an Observation, got str"),  # type: ignore[arg-type]
        (
            StepResult(
                Observation.of_user([{"type": "image"}], [Image("text", "png")]), 1.0, done=True
            ),  # type: ignore[arg-type]
            "expected an Image of bytes",
        ),
    ],
)
def test_a_result_that_is_none_is_told(result: StepResult, problem: str) -> None:
    with pytest.raises(protocol.FrameError, match=problem):
        protocol.encode_result(result)


def test_what_an_environment_gives_comes_back() -> None:
    image = Image(picture(8, 8).data, "png")
    shown = Observation.of_user([{"type": "text", "text": "see"}, {"type": "image"}], [image])
    result = StepResult(shown, np.float32(0.5), done=np.bool_(True), info={"a": [1]})  # type: ignore[arg-type]
    back = protocol.decode_result(json.loads(json.dumps(protocol.encode_result(result))))
    assert (back.reward, back.done, back.info) == (0.5, True, {"a": [1]})
    assert back.observation.images == (image,)
    for action in (Action(text="hi"), Action(tokens=(1, 2)), Action(text="")):
        assert protocol.decode_action(protocol.encode_action(action)) == action


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None:
        self.is_aborted = True


class Rig:
    def __init__(self) -> None:
        self.wire = Wire()
        self.told: list[Any] = []
        self.channel = FrameChannel(
            max_reply_bytes=100,
            on_overdue=lambda what, limit_s: self.told.append((what, limit_s)),
            on_malformed=self.told.append,
            on_closed=lambda: self.told.append("closed"),
        )
        self.channel.connection_made(self.wire)

    def call(self, what: str = "step", timeout_s: float = 60.0) -> asyncio.Future[bytes]:
        return self.channel.call(b"frame", timeout_s, what)


def reply(body: bytes) -> bytes:
    return protocol.HEADER.pack(len(body)) + body


async def test_replies_answer_calls_in_their_order_however_they_come() -> None:
    rig = Rig()
    calls = [rig.call() for _ in range(3)]
    assert rig.wire.written == [b"frame"] * 3
    data = reply(b"one") + reply(b"") + reply(b"x" * 100)
    for position in range(len(data)):
        rig.channel.data_received(data[position : position + 1])
    assert [call.result() for call in calls] == [b"one", b"", b"x" * 100]
    rig.channel.call(b"", 60.0, "start")
    assert len(rig.wire.written) == 3
    # One that nothing waits for any more takes its reply all the same.
    given_up, last = rig.call(), rig.call()
    given_up.cancel()
    rig.channel.data_received(reply(b"started") + reply(b"late") + reply(b"mine"))
    assert last.result() == b"mine"
    assert rig.told == []
    rig.channel.close()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (reply(b"x" * 101), "101 bytes exceed the limit of 100"),
        (protocol.HEADER.pack(protocol.MAX_FRAME_BYTES + 1), "exceeds the limit of"),
        (reply(b"one") + reply(b"two"), "it answers what it was not asked"),
    ],
)
async def test_what_is_no_reply_is_told(data: bytes, problem: str) -> None:
    rig = Rig()
    rig.call()
    rig.channel.data_received(data)
    (told,) = rig.told
    assert problem in told
    rig.channel.close()


async def test_a_lost_process_answers_nothing_any_more() -> None:
    rig = Rig()
    answered, given_up, waiting = (rig.call() for _ in range(3))
    rig.channel.data_received(reply(b"one"))
    given_up.cancel()
    rig.channel.connection_lost(None)
    assert (rig.told, rig.wire.is_aborted, answered.result()) == (["closed"], True, b"one")
    for call in (waiting, rig.call()):
        with pytest.raises(ChannelClosedError):
            await call
    assert len(rig.wire.written) == 3


async def test_a_call_is_overdue_by_its_own_limit() -> None:
    rig = Rig()
    rig.call("long")
    overdue = rig.call("short", 0.001)
    # Its time begins when the call before it was answered.
    rig.channel.data_received(reply(b"one"))
    await eventually(lambda: rig.told)
    assert rig.told == [("short", 0.001)]
    assert not overdue.done()
    rig.channel.close()
    with pytest.raises(ChannelClosedError):
        await overdue
