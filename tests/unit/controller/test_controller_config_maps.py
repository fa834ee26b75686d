"""ConfigMaps that a job names: told by name when they are missing, and no GPU is held for them."""

from __future__ import annotations

import pytest
from tests.unit.controller.cluster_in_memory import NAMESPACE, World
from tests.unit.controller.process_in_memory import Process, status_of

from tinsmith_controller.kube.api_client import ApiError, Json, Resource

MINUTE_S = 60


@pytest.fixture
def world() -> World:
    world = World()
    world.node("n0")
    return world


def job_on_data(world: World, name: str = "a") -> None:
    world.job(name, gpus=1)
    world.edit("trainingjobs", name, data={"configMapRef": {"name": "rows", "key": "train.jsonl"}})


def config_map(world: World, *keys: str, name: str = "rows") -> None:
    body = {"metadata": {"name": name}, "data": dict.fromkeys(keys, "{}")}
    world.store("configmaps", NAMESPACE, body)


def waiting_for(world: World, name: str = "a") -> str:
    return str(status_of(world, name).get("waitingFor", ""))


def test_a_missing_config_map_is_named_before_nodes_are_given(world: World) -> None:
    process = Process(world)
    job_on_data(world)

    process.settle(2)

    sentence = f"the ConfigMap rows, which does not exist in namespace {NAMESPACE}"
    assert sentence in waiting_for(world)
    assert not world.assigned()
    assert [(reason, told) for _, reason, told in process.events.told] == [
        ("Waiting", f"waits for {sentence}")
    ]


def test_a_job_begins_within_a_minute_of_its_config_map(world: World) -> None:
    process = Process(world)
    job_on_data(world)
    process.settle(2)
    config_map(world, "train.jsonl")

    process.settle(MINUTE_S, step_s=1.0)

    assert status_of(world, "a")["phase"] == "Running"


def test_an_entry_that_is_missing_is_named_with_those_that_are_there(world: World) -> None:
    process = Process(world)
    config_map(world, "test.jsonl", "train.json")
    job_on_data(world)

    process.settle(2)

    told = "the entry train.jsonl of the ConfigMap rows, which has test.jsonl, train.json"
    assert told in waiting_for(world)


def test_a_variable_of_a_missing_config_map_is_named_too(world: World) -> None:
    process = Process(world)
    world.job("a", gpus=1)
    reference = {"configMapKeyRef": {"name": "settings", "key": "judge"}}
    template = {"env": [{"name": "JUDGE", "valueFrom": reference}]}
    world.edit_trainer("a", template=template)

    process.settle(2)

    assert "the ConfigMap settings, which does not exist" in waiting_for(world)


def test_a_process_that_has_just_begun_gives_no_nodes_before_it_has_looked(world: World) -> None:
    job_on_data(world)
    Process(world).settle(2)

    Process(world).assignment.decide()

    assert not world.assigned()


def test_a_config_map_that_goes_while_its_pod_starts_is_named(world: World) -> None:
    process = Process(world)
    config_map(world, "train.jsonl")
    job_on_data(world)
    world.silent_pods.add("a-driver-0-e1")
    process.settle(8)
    assert status_of(world, "a")["phase"] == "Starting"
    assert "driver 0" in waiting_for(world)
    world.delete("configmaps", NAMESPACE, "rows")

    process.settle(MINUTE_S, step_s=1.0)

    assert "driver 0 is not ready: waits for the ConfigMap rows" in waiting_for(world)


def test_a_deployment_that_may_not_read_config_maps_leaves_them_to_the_kubelet(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(world)
    job_on_data(world)
    get = process.connection.get

    def forbidden(resource: Resource, namespace: str, name: str) -> Json:
        if resource.plural == "configmaps":
            raise ApiError(403, "Forbidden", "not allowed")
        return get(resource, namespace, name)

    monkeypatch.setattr(process.connection, "get", forbidden)

    process.settle()

    assert status_of(world, "a")["phase"] == "Running"
