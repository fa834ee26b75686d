"""Edits of specs: what a running job does with them, and one that failed."""

from __future__ import annotations

import functools
import json

import pytest
from tests.unit.controller.cluster_in_memory import NAMESPACE, Connection, World
from tests.unit.controller.process_in_memory import DEPLOYMENT, Process, status_of

from tinsmith_controller.kube.api_client import ApiError
from tinsmith_controller.pods.job_refusal import refusal_of
from tinsmith_jobs.naming import NamespacedName

TYPO = {"requests": {"memory": "64GB"}}


@pytest.fixture
def world() -> World:
    world = World()
    world.node("n0")
    world.node("n1")
    return world


def condition_of(world: World, name: str, type_: str, plural: str = "trainingjobs") -> dict:
    conditions = status_of(world, name, plural).get("conditions", [])
    return next((entry for entry in conditions if entry["type"] == type_), {})


def process_of(world: World) -> Process:
    return Process(world, check=functools.partial(refusal_of, DEPLOYMENT))


def running(world: World) -> Process:
    process = process_of(world)
    world.job("days", trainers=2, gpus=4)
    process.settle()
    assert status_of(world, "days")["phase"] == "Running"
    return process


def test_a_typo_leaves_a_running_job_as_it_was(world: World) -> None:
    process = running(world)
    pods = {pod["metadata"]["uid"] for pod in world.of("pods")}
    world.edit_trainer("days", resources=TYPO)

    process.settle()

    status = status_of(world, "days")
    refused = condition_of(world, "days", "SpecAccepted")
    assert status["phase"] == "Running"
    assert status["observedGeneration"] == refused["observedGeneration"] == 2
    assert refused["status"] == "False"
    assert "64GB" in refused["message"]
    assert "the spec before this edit holds" in refused["message"]
    assert {pod["metadata"]["uid"] for pod in world.of("pods")} == pods
    told = [message for name, reason, message in process.events.told if reason == "EditRefused"]
    assert len(told) == 1


def test_a_wrong_setting_of_its_recipe_leaves_a_running_job_as_it_was(world: World) -> None:
    process = process_of(world)
    world.job("days")
    roles = world.get("trainingjobs", NAMESPACE, "days")["spec"]["roles"]
    method = {"type": "supervised", "parameters": {"batch_size": 8}}
    world.edit("trainingjobs", "days", method=method, roles={"trainer": roles["trainer"]})
    process.settle()
    assert status_of(world, "days")["phase"] == "Running"
    world.edit("trainingjobs", "days", method={**method, "parameters": {"batch_siz": 8}})

    process.settle()

    assert status_of(world, "days")["phase"] == "Running"
    refused = condition_of(world, "days", "SpecAccepted")
    assert refused["status"] == "False"
    assert "batch_siz; did you mean batch_size?" in refused["message"]


def test_a_pod_that_is_lost_meanwhile_is_made_of_the_spec_that_holds(world: World) -> None:
    process = running(world)
    world.edit_trainer("days", resources=TYPO)
    process.settle()
    restarted = process_of(world)
    world.delete("pods", NAMESPACE, "days-trainer-0-e1", at_once=True)

    restarted.settle()

    assert status_of(world, "days")["phase"] == "Running"
    assert world.get("pods", NAMESPACE, "days-trainer-0-e2")["status"]["phase"] == "Running"


def test_taking_the_edit_back_clears_the_condition(world: World) -> None:
    process = running(world)
    before = world.get("trainingjobs", NAMESPACE, "days")["spec"]["roles"]
    world.edit_trainer("days", resources=TYPO)
    process.settle()
    world.edit("trainingjobs", "days", roles=before)

    process.settle()

    assert condition_of(world, "days", "SpecAccepted")["status"] == "True"
    assert status_of(world, "days")["phase"] == "Running"


@pytest.mark.parametrize("has_edit", [False, True], ids=["same", "edited"])
def test_a_field_of_a_later_release_leaves_a_running_job_as_it_was(
    world: World, has_edit: bool
) -> None:
    """As when the operators go back to a release before it."""
    running(world)
    body = world.get("trainingjobs", NAMESPACE, "days")
    accepted = json.loads(body["status"]["acceptedSpec"])
    accepted["roles"]["trainer"]["futureField"] = 1
    body["spec"] = {**accepted, "backoffLimit": 7} if has_edit else accepted
    body["status"]["acceptedSpec"] = json.dumps(accepted, sort_keys=True, separators=(",", ":"))
    world.store("trainingjobs", NAMESPACE, body)
    restarted = process_of(world)
    world.delete("pods", NAMESPACE, "days-trainer-0-e1", at_once=True)

    restarted.settle()

    assert status_of(world, "days")["phase"] == "Running"
    condition = condition_of(world, "days", "SpecAccepted")
    assert ("futureField is not a field" in condition.get("message", "")) == has_edit


def test_a_toleration_that_is_not_allowed_leaves_a_running_job_as_it_was(world: World) -> None:
    process = running(world)
    scheduling = world.get("trainingjobs", NAMESPACE, "days")["spec"]["scheduling"]
    tolerations = [{"key": "dedicated", "operator": "Exists"}]
    world.edit("trainingjobs", "days", scheduling={**scheduling, "tolerations": tolerations})

    process.settle()

    assert status_of(world, "days")["phase"] == "Running"
    assert "allowed_tolerations" in condition_of(world, "days", "SpecAccepted")["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        pytest.param({"gpus": 2}, "spec.roles.trainer.gpus", id="gpus"),
        pytest.param({"gpus": 0}, "spec.roles.trainer.gpus", id="no-gpus"),
    ],
)
def test_gpus_of_a_running_job_change_when_it_is_suspended(
    world: World, fields: dict[str, int], named: str
) -> None:
    process = running(world)
    world.edit_trainer("days", **fields)
    process.settle()
    assert named in condition_of(world, "days", "SpecAccepted")["message"]
    world.delete("pods", NAMESPACE, "days-trainer-0-e1", at_once=True)
    process.settle()
    assert sum(world.used().values()) == 8

    world.edit("trainingjobs", "days", suspend=True)
    process.settle()
    assert status_of(world, "days")["phase"] == "Suspended"
    assert condition_of(world, "days", "SpecAccepted")["status"] == "True"
    world.edit("trainingjobs", "days", suspend=False)
    process.settle()

    assert status_of(world, "days")["phase"] == "Running"
    assert sum(world.used().values()) == 2 * fields["gpus"]


def test_the_model_of_a_running_job_changes_when_it_is_suspended(world: World) -> None:
    process = running(world)
    world.edit("trainingjobs", "days", model={"name": "other", "source": "file:///models/other"})

    process.settle()

    assert "spec.model can change only" in condition_of(world, "days", "SpecAccepted")["message"]


def test_replicas_of_a_running_job_change_at_once(world: World) -> None:
    process = running(world)
    world.edit_trainer("days", replicas=3)

    process.settle(20)

    assert sum(world.used().values()) == 12
    assert not condition_of(world, "days", "SpecAccepted")


def test_a_job_with_a_refused_edit_can_be_suspended_and_cancelled(world: World) -> None:
    process = running(world)
    world.edit_trainer("days", resources=TYPO)
    process.settle()
    world.edit("trainingjobs", "days", cancel=True)

    process.settle()

    assert status_of(world, "days")["phase"] == "Cancelled"
    assert not world.assigned()


def test_memory_of_a_running_job_counts_for_pods_that_are_made_later(world: World) -> None:
    process = running(world)
    world.edit_trainer("days", resources={"requests": {"cpu": "2", "memory": "4Gi"}})
    process.settle()
    assert not condition_of(world, "days", "SpecAccepted")
    world.delete("pods", NAMESPACE, "days-trainer-0-e1", at_once=True)

    process.settle()

    entries = {(e["role"], e["index"]): e for e in status_of(world, "days")["assignments"]}
    assert entries["trainer", 0]["memoryBytes"] == 4 * 2**30
    assert entries["trainer", 1]["memoryBytes"] == 64 * 2**20
    assert status_of(world, "days")["phase"] == "Running"


def test_a_pod_that_was_not_made_yet_is_placed_with_its_new_size(world: World) -> None:
    process = process_of(world)
    world.job("days", gpus=1)
    process.deliver("trainingjobs")
    process.look("days")
    process.assignment.decide()
    world.edit_trainer("days", resources={"requests": {"cpu": "2", "memory": "4Gi"}})

    process.settle()

    [entry] = [each for each in status_of(world, "days")["assignments"] if each.get("node")]
    assert entry["memoryBytes"] == 4 * 2**30
    assert status_of(world, "days")["phase"] == "Running"


def test_a_typo_leaves_a_pool_as_it_was(world: World) -> None:
    process = process_of(world)
    world.pool("shared", replicas=1, gpus=1)
    process.settle()
    trainer = world.get("trainerpools", NAMESPACE, "shared")["spec"]["trainer"]
    world.edit("trainerpools", "shared", trainer={**trainer, "resources": TYPO})

    process.settle()

    assert status_of(world, "shared", "trainerpools")["phase"] == "Ready"
    assert condition_of(world, "shared", "SpecAccepted", "trainerpools")["status"] == "False"


def test_a_job_that_could_not_be_run_goes_on_once_it_is_corrected(world: World) -> None:
    process = process_of(world)
    world.job("new")
    world.edit_trainer("new", resources=TYPO)
    process.settle()
    assert status_of(world, "new")["phase"] == "Failed"
    world.edit_trainer("new", resources={"requests": {"memory": "64Gi"}})

    process.settle()

    status = status_of(world, "new")
    assert status["phase"] == "Running"
    assert status["observedGeneration"] == 3
    assert not condition_of(world, "new", "Failed")


def test_a_job_that_failed_later_says_what_to_do(world: World) -> None:
    process = process_of(world)
    world.job("old")
    world.edit("trainingjobs", "old", activeDeadlineSeconds=3)
    process.settle(20)
    assert status_of(world, "old")["phase"] == "Failed"
    generation = status_of(world, "old")["observedGeneration"]
    world.edit("trainingjobs", "old", activeDeadlineSeconds=3000)

    process.settle()

    status = status_of(world, "old")
    assert status["phase"] == "Failed"
    assert "`tinsmith jobs retry old`, or delete it and apply it anew" in status["waitingFor"]
    assert status["observedGeneration"] == generation


def retry(world: World, name: str) -> None:
    """Ask for a failed job as `tinsmith jobs retry` does."""
    job = world.get("trainingjobs", NAMESPACE, name)
    job["metadata"]["annotations"] = {"tinsmith.dev/retry": job["status"]["completionTime"]}
    world.store("trainingjobs", NAMESPACE, job)


def test_a_failed_job_is_tried_again_by_its_present_spec(world: World) -> None:
    process = process_of(world)
    world.job("old")
    world.edit("trainingjobs", "old", activeDeadlineSeconds=3)
    process.settle(20)
    world.edit("trainingjobs", "old", activeDeadlineSeconds=3000)
    process.settle()
    assert status_of(world, "old")["phase"] == "Failed"
    retry(world, "old")

    process.settle(20)

    status = status_of(world, "old")
    assert status["phase"] == "Running"
    assert status["observedGeneration"] == 3
    assert "completionTime" not in status
    assert {entry["epoch"] for entry in status["assignments"]} == {2}


def test_what_the_cluster_refused_is_asked_again_when_a_job_is_tried_again(world: World) -> None:
    refusals = ["no such volume"]

    def refuse(method: str, plural: str, name: str) -> str:
        if (method, plural) == ("POST", "pods") and refusals:
            raise ApiError(422, "Invalid", refusals[0])
        return ""

    process = Process(world, Connection(world, refuse))
    world.job("old")
    for _ in range(6):
        process.attempt(process.settle)
        process.due.add(NamespacedName("TrainingJob", NAMESPACE, "old"))
    assert "no such volume" in status_of(world, "old")["failure"]["message"]
    refusals.clear()
    retry(world, "old")

    process.settle(20)

    assert status_of(world, "old")["phase"] == "Running"
