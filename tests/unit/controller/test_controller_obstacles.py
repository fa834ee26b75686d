"""What keeps a job from being started, besides nodes: the state of the cluster alone decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.controller.cluster_in_memory import NAMESPACE, World
from tests.unit.controller.process_in_memory import Process, status_of

from tinsmith_controller.kube.api_client import Json
from tinsmith_controller.owned_objects import RetryLaterError
from tinsmith_jobs.plan.observed import Report
from tinsmith_jobs.status import Saved


@pytest.fixture
def world() -> World:
    world = World()
    world.node("n0")
    return world


def test_a_restart_gives_no_nodes_to_a_job_that_waits_for_something_else(world: World) -> None:
    first = Process(world)
    world.job("blocked", priorityClassName="high")
    first.settle()
    assert "PriorityClass high" in status_of(world, "blocked")["waitingFor"]
    second = Process(world)

    second.assignment.decide()  # before any look, as a queue may have it

    assert not world.assigned()
    world.job("fine")
    second.settle()
    assert status_of(world, "fine")["phase"] == "Running"
    world.edit("trainingjobs", "fine", cancel=True)
    world.priority_class("high", 1)
    second.settle()
    assert status_of(world, "blocked")["phase"] == "Running"


def driver_of(world: World, job: str) -> Json:
    [found] = [pod for pod in world.of("pods") if f"{job}-driver" in pod["metadata"]["name"]]
    return found


def job_on_a_pool(world: World, name: str) -> None:
    world.job(name)
    spec = world.get("trainingjobs", NAMESPACE, name)["spec"]
    roles = {"driver": spec["roles"]["driver"]}
    world.edit("trainingjobs", name, model=None, poolRef={"name": "shared"}, roles=roles)


def test_a_job_waits_until_its_pool_has_a_replica(world: World) -> None:
    process = Process(world)
    world.node("n0", 0)
    world.pool("shared", replicas=1, gpus=1)
    job_on_a_pool(world, "guest")
    process.settle()
    assert status_of(world, "guest")["phase"] == "Queued"
    assert "has no replica that is ready" in status_of(world, "guest")["waitingFor"]

    world.node("n0", 8)
    process.settle()

    assert status_of(world, "guest")["phase"] == "Running"


def test_a_job_that_began_stays_while_its_pool_is_replaced(world: World) -> None:
    process = Process(world)
    world.pool("shared", replicas=1, gpus=1)
    job_on_a_pool(world, "guest")
    process.settle()
    world.node("n0", is_ready=False)
    process.settle(4)
    assert status_of(world, "shared", "trainerpools")["phase"] != "Ready"
    world.node("n0")

    process.settle(20)

    assert status_of(world, "guest")["phase"] == "Running"


def test_a_cluster_without_gpus_says_how_to_do_without(world: World) -> None:
    process = Process(world)
    world.node("n0", 0)
    world.job("a", gpus=1)

    process.settle()

    assert "with gpus: 0 it runs on a CPU" in status_of(world, "a")["waitingFor"]


RULES = {"nodeSelector": {"pool": "a100"}, "gpuProducts": ["H100"], "queueName": "reserch"}
WRONG_RULES = (
    "queue reserch does not exist",
    "no node that would do has the label pool=a100",
    "no node has the product H100",
)


@pytest.mark.parametrize("priority", ["", "high"])
def test_everything_that_is_not_there_is_named_at_once(
    world: World, tmp_path: Path, priority: str
) -> None:
    queues = tmp_path / "queues.toml"
    queues.write_text("[queues.research]\nmax_gpus = 8\n")
    process = Process(world, queues=queues)
    world.job("a", **RULES, **({"priorityClassName": priority} if priority else {}))

    process.settle()

    told = status_of(world, "a")["waitingFor"]
    for sentence in WRONG_RULES:
        assert told.count(sentence) == 1, told
    assert ("PriorityClass high" in told) == bool(priority)


@pytest.mark.parametrize("scheduling", [{}, {"priorityClassName": "high"}], ids=["nodes", "class"])
def test_one_event_says_what_a_job_waits_for(world: World, scheduling: dict[str, str]) -> None:
    process = Process(world)
    world.job("first", gpus=8)
    process.settle()
    world.job("a", gpus=8, **scheduling)

    process.settle(60)
    restarted = Process(world)
    restarted.settle(60)

    events = [*process.events.told, *restarted.events.told]
    waits = [told for name, reason, told in events if (name, reason) == ("a", "Waiting")]
    assert len(waits) == 1
    assert waits[0] == status_of(world, "a")["waitingFor"]


def test_a_job_that_gets_its_nodes_at_once_has_no_event_about_waiting(world: World) -> None:
    process = Process(world)
    world.job("a", gpus=8)

    process.settle()

    assert "Waiting" not in {reason for _, reason, _ in process.events.told}


def test_a_job_waits_for_the_final_checkpoint_of_another_and_keeps_its_name(world: World) -> None:
    process = Process(world)
    world.job("second")
    world.edit("trainingjobs", "second", checkpoint={"resumeFrom": "trainingJobs/first"})
    process.settle()
    assert status_of(world, "second")["waitingFor"] == (
        "waits for the TrainingJob first, which does not exist"
    )
    world.job("first")
    process.settle()
    assert status_of(world, "first")["phase"] == "Running"
    assert "final checkpoint of the TrainingJob first" in status_of(world, "second")["waitingFor"]

    saved = Saved("projects/p/trainingRuns/r/checkpoints/final", 3)
    uid = world.get("trainingjobs", NAMESPACE, "first")["metadata"]["uid"]
    report = Report(
        step=3, max_steps=3, run="r", update_time=world.now(), metrics={}, checkpoint=saved
    )
    process.reconciler.take_reports({uid: report})
    world.succeed(driver_of(world, "first"))
    process.settle()

    assert status_of(world, "second")["phase"] == "Running"
    driver = driver_of(world, "second")
    [method] = [
        entry["value"]
        for entry in driver["spec"]["containers"][0]["env"]
        if entry["name"] == "TINSMITH_JOB_METHOD"
    ]
    assert json.loads(method)["checkpoint"]["resumeFrom"] == saved.name


def test_a_job_that_comes_after_the_one_that_it_names_begins_at_once(world: World) -> None:
    process = Process(world)
    saved = {"name": "projects/p/trainingRuns/r/checkpoints/final", "step": 3}
    world.job("first")
    first = world.get("trainingjobs", NAMESPACE, "first")
    status = {"phase": "Succeeded", "checkpoint": {"final": saved}}
    world.store("trainingjobs", NAMESPACE, {**first, "status": status})
    world.job("second")
    world.edit("trainingjobs", "second", checkpoint={"resumeFrom": "trainingJobs/first"})

    process.settle()

    assert status_of(world, "second")["phase"] == "Running"
    assert status_of(world, "second")["namedCheckpoints"] == {"first": saved["name"]}


def test_the_end_of_a_job_leaves_the_keys_of_a_pool_that_has_its_name(world: World) -> None:
    process = Process(world)
    world.pool("same", replicas=1, gpus=1)
    process.settle()
    job_on_a_pool(world, "same")
    world.edit("trainingjobs", "same", poolRef={"name": "same"})
    with pytest.raises(RetryLaterError, match="is left of another workload"):
        process.settle()
    assert status_of(world, "same")["assignments"]

    world.edit("trainingjobs", "same", cancel=True)
    process.settle()

    assert status_of(world, "same")["phase"] == "Cancelled"
    assert world.has("secrets", NAMESPACE, "same-pod-keys")
