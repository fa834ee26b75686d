from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import struct_pb2
from grpc_status import rpc_status
from tests.fakes.scheduler import FakeScheduler
from tests.support.pod_keys import POD_KEY, pod
from tests.support.wait import eventually

from tinsmith import tensors
from tinsmith.environments.observation_codec import decode_tokens
from tinsmith.rpc.error_codec import decode_status
from tinsmith.v1 import environment_pb2, environment_pb2_grpc, tensors_pb2, trajectories_pb2
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.pod import EnvironmentPod
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.permissions import KeyRole

Code = grpc.StatusCode
Metadata = tuple[tuple[str, str], ...]
UNRULY_FOLDER = Path(__file__).parents[2] / "unit" / "environment"


def key(number: int) -> str:
    return f"tsk_{number:012d}_{'a' * 43}"


def bearer(number: int) -> Metadata:
    return (("authorization", f"Bearer {key(number)}"),)


MINE, THEIRS = bearer(1), bearer(2)


def pid_of(answer: environment_pb2.StepInstanceResponse) -> int:
    return int(answer.info.fields["pid"].number_value)


class Rig:
    def __init__(self, pod: EnvironmentPod, channel: grpc.aio.Channel) -> None:
        self.pod = pod
        self.stub: Any = environment_pb2_grpc.EnvironmentServiceStub(channel)

    async def create(
        self, environment: str = "unruly", *, metadata: Metadata = MINE, **fields: Any
    ) -> environment_pb2.EnvironmentInstance:
        config = struct_pb2.Struct()
        config.update(fields.pop("config", {}))
        request = environment_pb2.CreateInstanceRequest(
            parent=f"projects/mine/environments/{environment}",
            request_id=fields.pop("request_id", str(uuid.uuid4())),
            config=config,
            **fields,
        )
        created: environment_pb2.EnvironmentInstance = await self.stub.CreateInstance(
            request, metadata=metadata, timeout=20
        )
        return created

    async def step(
        self, name: str, index: int, text: str = "go", *, metadata: Metadata = MINE
    ) -> environment_pb2.StepInstanceResponse:
        request = environment_pb2.StepInstanceRequest(
            instance=name, step_index=index, action=trajectories_pb2.Action(text=text)
        )
        answer: environment_pb2.StepInstanceResponse = await self.stub.StepInstance(
            request, metadata=metadata, timeout=20
        )
        return answer


@contextlib.asynccontextmanager
async def running(**fields: Any) -> AsyncIterator[Rig]:
    scheduler = FakeScheduler()
    for number, project in enumerate(("mine", "theirs"), start=1):
        key_id = f"{number:012d}"
        scheduler.projects[key_id], scheduler.roles[key_id] = project, KeyRole.MEMBER
    await scheduler.server.start()
    config = EnvironmentConfig(
        **{
            "scheduler_address": scheduler.server.address,
            "pod_key": POD_KEY,
            "num_workers": 2,
            "environments": "unruly=unruly_environments:UnrulyEnvironment",
            "python_path": str(UNRULY_FOLDER),
            "drain_timeout_s": 1.0,
            **fields,
        }
    )
    pod = EnvironmentPod(config)
    try:
        await pod.start()
        async with grpc.aio.insecure_channel(pod.address) as channel:
            yield Rig(pod, channel)
    finally:
        await pod.stop()
        await scheduler.server.stop()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running() as rig:
        yield rig


@contextlib.contextmanager
def expect_rpc_error(code: grpc.StatusCode, *, reason: str) -> Iterator[list[str]]:
    messages: list[str] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield messages
    status = rpc_status.from_call(caught.value)
    assert status is not None
    assert (caught.value.code(), decode_status(status).reason) == (code, reason)
    messages.append(status.message)


async def test_environments_are_listed_with_their_settings(rig: Rig) -> None:
    request = environment_pb2.ListEnvironmentsRequest(parent="projects/mine")
    answer = await rig.stub.ListEnvironments(request, metadata=MINE, timeout=60)
    assert [e.name.rpartition("/")[2] for e in answer.environments] == [
        "guessing", "math", "unruly",
    ]  # fmt: skip
    assert answer.environments[0].description
    assert answer.environments[0].default_config["max_turns"] == 8
    with expect_rpc_error(Code.NOT_FOUND, reason="RESOURCE_NOT_FOUND"):
        await rig.stub.ListEnvironments(request, metadata=THEIRS, timeout=60)
    request.page_size = 2
    first = await rig.stub.ListEnvironments(request, metadata=MINE, timeout=60)
    assert list(first.environments) == list(answer.environments[:2])
    request.page_token = first.next_page_token
    last = await rig.stub.ListEnvironments(request, metadata=MINE, timeout=60)
    assert list(last.environments) == list(answer.environments[2:])
    assert not last.next_page_token
    request.page_token = "another list's"
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.stub.ListEnvironments(request, metadata=MINE, timeout=60)


async def test_a_game_over_the_wire(rig: Rig) -> None:
    instance = await rig.create("guessing", seed=11, config={"high": 3, "max_turns": 3})
    assert "from 1 to 3" in instance.observation.messages[0].content
    for index, guess in enumerate(("1", "2", "3")):
        answer = await rig.step(instance.name, index, guess)
        if answer.done:
            break
    assert answer.reward == 1.0
    assert answer.info["correct"] is True
    request = environment_pb2.GetInstanceRequest(name=instance.name)
    after = await rig.stub.GetInstance(request, metadata=MINE, timeout=60)
    assert after.state == environment_pb2.EnvironmentInstance.STATE_FINISHED
    assert after.num_steps == index + 1
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="WRONG_STATE"):
        await rig.step(instance.name, index + 1, "1")


async def test_a_repeated_step_and_a_repeated_create(rig: Rig) -> None:
    request_id = str(uuid.uuid4())
    first = await rig.create(request_id=request_id)
    again = await rig.create(request_id=request_id)
    assert again.name == first.name
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="REQUEST_ID_REUSED"):
        await rig.create(request_id=request_id, seed=9)
    assert await rig.step(first.name, 0) == await rig.step(first.name, 0)
    with expect_rpc_error(Code.ABORTED, reason="ABORTED"):
        await rig.step(first.name, 0, "another")


async def test_an_observation_says_where_the_next_action_ends(rig: Rig) -> None:
    instance = await rig.create()
    assert not instance.observation.stop_strings
    shown = (await rig.step(instance.name, 0, "stops")).observation
    assert (list(shown.stop_strings), list(shown.stop_token_ids)) == (["\n"], [7])
    after = (await rig.step(instance.name, 1)).observation
    assert not after.stop_strings
    assert not after.stop_token_ids
    with expect_rpc_error(Code.ABORTED, reason="ENVIRONMENT_FAILED") as messages:
        await rig.step(instance.name, 2, "empty stop")
    assert "a stop string has 1 to 256 characters" in messages[0]


async def test_an_episode_of_tokens_over_the_wire() -> None:
    named = "unruly=unruly_environments:UnrulyEnvironment,tokens=unruly_environments:TokenSums"
    async with running(environments=named) as rig:
        request = environment_pb2.ListEnvironmentsRequest(parent="projects/mine")
        listed = (await rig.stub.ListEnvironments(request, metadata=MINE)).environments
        kinds = {each.name.rpartition("/")[2]: list(each.action_kinds) for each in listed}
        assert kinds["tokens"] == [trajectories_pb2.ACTION_KIND_TOKENS]
        assert kinds["guessing"] == [trajectories_pb2.ACTION_KIND_TEXT]
        instance = await rig.create("tokens", seed=40)
        assert list(instance.action_kinds) == [trajectories_pb2.ACTION_KIND_TOKENS]
        assert decode_tokens(instance.observation) == (40, 41)
        action = trajectories_pb2.Action(tokens=tensors.encode_tokens([5, 6]))
        step = environment_pb2.StepInstanceRequest(instance=instance.name, action=action)
        answer = await rig.stub.StepInstance(step, metadata=MINE, timeout=20)
        assert (answer.reward, decode_tokens(answer.observation)) == (11.0, (11,))
        with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD") as messages:
            await rig.step(instance.name, 1, "text")
        assert "must be of the kind tokens, got text" in messages[0]
        negative = trajectories_pb2.Action(tokens=tensors.encode_tokens([-12]))
        step = environment_pb2.StepInstanceRequest(
            instance=instance.name, step_index=1, action=negative
        )
        with expect_rpc_error(Code.ABORTED, reason="ENVIRONMENT_FAILED") as messages:
            await rig.stub.StepInstance(step, metadata=MINE, timeout=20)
        assert "a token is a whole number from 0" in messages[0]


async def test_a_foreign_instance_is_not_found(rig: Rig) -> None:
    instance = await rig.create()
    with expect_rpc_error(Code.NOT_FOUND, reason="ENVIRONMENT_NOT_FOUND"):
        await rig.create(metadata=THEIRS)
    with expect_rpc_error(Code.NOT_FOUND, reason="INSTANCE_NOT_FOUND"):
        await rig.step(instance.name, 0, metadata=THEIRS)
    get = environment_pb2.GetInstanceRequest(name=instance.name)
    with expect_rpc_error(Code.NOT_FOUND, reason="INSTANCE_NOT_FOUND"):
        await rig.stub.GetInstance(get, metadata=THEIRS, timeout=60)
    delete = environment_pb2.DeleteInstanceRequest(name=instance.name)
    await rig.stub.DeleteInstance(delete, metadata=THEIRS, timeout=60)
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await rig.step(instance.name, 0, metadata=pod("gateway"))
    for _ in range(2):
        await rig.stub.DeleteInstance(delete, metadata=MINE, timeout=60)
    with expect_rpc_error(Code.NOT_FOUND, reason="INSTANCE_NOT_FOUND"):
        await rig.step(instance.name, 1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        pytest.param({"environment": "a/b"}, "parent", id="name"),
        pytest.param({"request_id": "x"}, "request_id", id="request-id"),
        pytest.param({"config": {"nothing": 1}}, "config.nothing", id="unknown-setting"),
        pytest.param(
            {"environment": "guessing", "config": {"high": "x"}}, "config.high", id="setting"
        ),
    ],
)
async def test_wrong_fields_are_named(rig: Rig, fields: dict[str, Any], field: str) -> None:
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD") as messages:
        await rig.create(**fields)
    assert messages[0].startswith(field)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        pytest.param(trajectories_pb2.Action(), "INVALID_FIELD", id="empty"),
        pytest.param(
            trajectories_pb2.Action(tokens=tensors.encode_tokens([1])), "INVALID_FIELD", id="kind"
        ),
        pytest.param(
            trajectories_pb2.Action(tokens=tensors_pb2.Tensor(shape=[3])),
            "SHAPE_MISMATCH",
            id="malformed",
        ),
    ],
)
async def test_wrong_actions_are_refused(
    rig: Rig, action: trajectories_pb2.Action, reason: str
) -> None:
    instance = await rig.create("math")
    request = environment_pb2.StepInstanceRequest(instance=instance.name, action=action)
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason=reason):
        await rig.stub.StepInstance(request, metadata=MINE, timeout=60)
    assert (await rig.step(instance.name, 0, "1")).done


async def stream(
    rig: Rig, steps: list[tuple[str, int, str]]
) -> dict[str, environment_pb2.StepInstancesResponse]:
    async def requests() -> AsyncIterator[environment_pb2.StepInstancesRequest]:
        for name, index, text in steps:
            yield environment_pb2.StepInstancesRequest(
                instance=name, step_index=index, action=trajectories_pb2.Action(text=text)
            )

    call = rig.stub.StepInstances(requests(), metadata=MINE, timeout=30)
    return {answer.instance: answer async for answer in call}


async def test_a_stream_outlives_failed_steps() -> None:
    async with running(max_stream_steps=3) as rig:
        names = [(await rig.create()).name for _ in range(8)]
        steps = [(name, 0, "raise" if i % 2 else "go") for i, name in enumerate(names)]
        steps += [("nonsense", 0, "go"), ("projects/theirs/environments/a/instances/b", 0, "go")]
        answers = await stream(rig, steps)
        assert len(answers) == 10
        for i, name in enumerate(names):
            answer = answers[name]
            if i % 2:
                assert answer.failure.reason == "ENVIRONMENT_FAILED"
                assert answer.failure.code == Code.ABORTED.value[0]
            else:
                assert answer.step.reward == 0.5
        assert answers["nonsense"].failure.reason == "INVALID_FIELD"
        assert answers[steps[-1][0]].failure.reason == "INSTANCE_NOT_FOUND"


async def test_killing_a_shared_worker_in_the_middle_of_steps_fails_its_episodes_alone(
    tmp_path: Path,
) -> None:
    async with running(max_project_workers=2) as rig:
        await kill_a_worker_in_the_middle_of_steps(rig, tmp_path / "hangs")


async def kill_a_worker_in_the_middle_of_steps(rig: Rig, hangs: Path) -> None:
    config = {"hangs_at": str(hangs)}
    names = [(await rig.create(config=config)).name for _ in range(6)]
    pids = {}
    for name in names:
        pids[name] = pid_of(await rig.step(name, 0))
    assert len(set(pids.values())) == 2
    victim = pids[names[0]]
    hanging = asyncio.create_task(rig.step(names[0], 1, "hang"))
    await eventually(hangs.exists)
    os.kill(victim, signal.SIGKILL)
    with expect_rpc_error(Code.ABORTED, reason="ENVIRONMENT_FAILED") as messages:
        await hanging
    assert "SIGKILL" in messages[0]
    for name in names[1:]:
        if pids[name] == victim:
            with expect_rpc_error(Code.ABORTED, reason="ENVIRONMENT_FAILED"):
                await rig.step(name, 1)
        else:
            assert (await rig.step(name, 1)).reward == 0.5
    await eventually(lambda: len(rig.pod.workers.workers) == 2)
    fresh = [(await rig.create()).name for _ in range(4)]
    answers = await stream(rig, [(name, 0, "go") for name in fresh])
    assert {pid_of(answer.step) for answer in answers.values()} == {
        worker.pid for worker in rig.pod.workers.workers
    }


async def test_a_hanging_step_fails_in_time_and_other_workers_go_on() -> None:
    async with running(step_timeout_s=5.0) as rig:
        names = [(await rig.create()).name for _ in range(2)]
        hanging = asyncio.create_task(rig.step(names[0], 0, "hang"))
        assert (await rig.step(names[1], 0)).reward == 0.5
        assert not hanging.done()
        with expect_rpc_error(Code.ABORTED, reason="ENVIRONMENT_FAILED") as messages:
            await hanging
        assert "did not finish within 5 s" in messages[0]


async def test_a_failed_reset_is_a_failed_environment(rig: Rig) -> None:
    with expect_rpc_error(Code.ABORTED, reason="ENVIRONMENT_FAILED") as messages:
        await rig.create(config={"fail_reset": True})
    assert "no level" in messages[0]


async def test_a_class_that_can_not_be_imported_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"environment lost: .*No module named"):
        async with running(environments="lost=nowhere:Nothing"):
            pass


async def test_a_call_without_a_key_is_refused(rig: Rig) -> None:
    with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_MISSING"):
        await rig.create(metadata=())
