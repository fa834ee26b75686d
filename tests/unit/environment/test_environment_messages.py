"""Messages about environments: what is refused by its field, and what comes back as it was."""

from __future__ import annotations

import datetime
import uuid
from typing import Any

import numpy as np
import pytest

from tinsmith.environments.observation_codec import encode_observation
from tinsmith.names import EnvironmentName, InstanceName
from tinsmith.tensors import encode_tensor, encode_tokens
from tinsmith.v1 import environment_pb2, trajectories_pb2
from tinsmith_environment import Action, Observation, StepResult
from tinsmith_environment.environment import ToolCall
from tinsmith_environment.instances.instance import InstanceState, InstanceView
from tinsmith_environment.instances.statistics import JobStatistics, StatisticsKey
from tinsmith_environment.rpc import codec
from tinsmith_runtime.errors import AbortedError, InvalidFieldError, ShapeMismatchError

NOW = datetime.datetime(2026, 11, 29, tzinfo=datetime.UTC)
Wire = trajectories_pb2.Action


def call(name: str = "f", arguments: str = "{}", call_id: str = "c") -> trajectories_pb2.ToolCall:
    return trajectories_pb2.ToolCall(name=name, arguments_json=arguments, id=call_id)


def test_an_action_is_a_text_with_calls_or_tokens() -> None:
    assert codec.decode_action(Wire(text="")) == Action(text="")
    spoken = codec.decode_action(Wire(text="hi", tool_calls=[call(arguments='{"a": 1}')]))
    assert spoken == Action(text="hi", tool_calls=(ToolCall("f", '{"a": 1}', "c"),))
    assert codec.decode_action(Wire(tokens=encode_tokens([1, 2]))) == Action(tokens=(1, 2))
    assert len(codec.decode_action(Wire(text="", tool_calls=[call()] * 128)).tool_calls) == 128
    assert codec.decode_step_index(0) == 0


@pytest.mark.parametrize(
    ("action", "field"),
    [
        (Wire(), "action"),
        (Wire(tokens=encode_tokens([1]), tool_calls=[call()]), "action.tool_calls"),
        (Wire(tokens=encode_tensor(np.zeros((1, 1), np.int64))), "action.tokens"),
        (Wire(tokens=encode_tensor(np.zeros(1, np.float32))), "action.tokens"),
        (Wire(text="", tool_calls=[call()] * 129), "action.tool_calls"),
        (Wire(text="", tool_calls=[call(), call("no name")]), "action.tool_calls[1].name"),
        (Wire(text="", tool_calls=[call(arguments="[]")]), "action.tool_calls[0].arguments_json"),
        (Wire(text="", tool_calls=[call(arguments="{")]), "action.tool_calls[0].arguments_json"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_an_action_that_is_none_is_refused_by_its_field(action: Wire, field: str) -> None:
    with pytest.raises((InvalidFieldError, ShapeMismatchError)) as refusal:
        codec.decode_action(action)
    assert refusal.value.metadata["field"] == field


CONFIG: dict[str, Any] = {
    "none": None,
    "yes": True,
    "whole": 3,
    "part": 0.5,
    "text": "a",
    "list": [1, None, {"deep": [False]}],
}


def test_a_config_comes_back_as_it_was() -> None:
    decoded = codec.decode_config(codec.encode_struct(CONFIG))
    assert decoded == CONFIG
    assert isinstance(decoded["whole"], int)
    assert decoded["yes"] is True
    for number in (float("inf"), float("nan")):
        with pytest.raises(InvalidFieldError, match="finite"):
            codec.decode_config(codec.encode_struct({"a": [number]}))


def test_a_new_instance_is_wished_for_with_all_that_it_says() -> None:
    name, client = EnvironmentName("p", "task"), uuid.uuid4()
    request = environment_pb2.CreateInstanceRequest(
        seed=7,
        config=codec.encode_struct(CONFIG),
        client_id=str(client).upper(),
        job="j" * 63,
    )
    new = codec.decode_new_instance(name, request)
    assert (new.project, new.environment, new.seed, new.config) == ("p", "task", 7, CONFIG)
    assert (new.client_id, new.job) == (str(client), "j" * 63)
    plain = codec.decode_new_instance(name, environment_pb2.CreateInstanceRequest())
    assert (plain.seed, plain.config, plain.client_id, plain.job) == (0, {}, "", "")
    for field, wrong in (
        ("client_id", environment_pb2.CreateInstanceRequest(client_id="me")),
        ("job", environment_pb2.CreateInstanceRequest(job="j" * 64)),
    ):
        with pytest.raises(InvalidFieldError) as refusal:
            codec.decode_new_instance(name, wrong)
        assert refusal.value.metadata["field"] == field
    with pytest.raises(InvalidFieldError, match="step_index"):
        codec.decode_step_index(-1)


def test_statistics_of_a_job_are_told_whole() -> None:
    statistics = JobStatistics(NOW, num_episodes=5, num_abandoned=1)
    statistics.num_failures["raised"] += 2
    for number in range(100):
        statistics.add_step(number / 100)
    statistics.add_end(1.0)
    statistics.add_end(2.0)
    told = codec.encode_statistics(StatisticsKey("p", "job", "task"), statistics)
    assert (told.environment, told.job) == ("projects/p/environments/task", "job")
    assert (told.num_episodes, told.num_finished, told.num_abandoned) == (5, 2, 1)
    assert (told.num_failures, told.num_steps, told.mean_reward) == ({"raised": 2}, 100, 1.5)
    assert (told.step_time_p50_seconds, told.step_time_p99_seconds) == (0.5, 0.99)
    assert told.start_time.ToDatetime(datetime.UTC) == NOW
    nothing = codec.encode_statistics(StatisticsKey("p", "", "task"), JobStatistics(NOW))
    assert (nothing.mean_reward, nothing.step_time_p99_seconds) == (0.0, 0.0)


@pytest.mark.parametrize("state", list(InstanceState))
def test_an_instance_is_told_whole(state: InstanceState) -> None:
    view = InstanceView(
        name=InstanceName("p", "task", "i"),
        state=state,
        observation=Observation.of_user("hi"),
        num_steps=3,
        expire_time=NOW,
        action_kinds=frozenset({"text"}),
    )
    told = codec.encode_instance(view)
    assert told.name == "projects/p/environments/task/instances/i"
    kind = environment_pb2.EnvironmentInstance.State.Name(told.state)
    assert kind == f"STATE_{state.name}"
    assert (told.num_steps, told.max_batch_steps) == (3, 256)
    assert told.expire_time.ToDatetime(datetime.UTC) == NOW
    assert told.observation == encode_observation(view.observation)
    assert len(told.action_kinds) == 1


def test_a_step_is_told_with_its_result_or_its_failure() -> None:
    result = StepResult(Observation.of_user("hi"), 0.5, done=True, info={"a": [1]})
    told = codec.encode_step(result)
    assert (told.reward, told.done) == (0.5, True)
    assert told.observation == encode_observation(result.observation)
    assert codec.decode_config(told.info) == {"a": [1]}
    failure = codec.encode_failure(AbortedError("given up"))
    assert (failure.reason, failure.message, failure.code) == (AbortedError.reason, "given up", 10)
