"""Lives of jobs in a queue of Kueue, from the label to `Finished`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.kueue_admitter import condition_of, is_true
from tests.unit.controller.cluster_in_memory import GPU, NAMESPACE, SMALL, ApiError
from tests.unit.controller.kueue_in_memory import (
    NODE_LABEL,
    QUEUE,
    QUOTA,
    KueueCluster,
    NoWriteLeft,
)

from tinsmith_jobs.quantities import parse_quantity

from_here = 0
NONE_LEFT = {"fast": {**QUOTA, GPU: "0"}}
MAX_WRITES_OF_A_LIFE = 60


def test_a_whole_life() -> None:
    cluster = KueueCluster(NONE_LEFT)
    cluster.submit("a", gpus=8)
    cluster.settle()
    status = cluster.status("a")
    assert cluster.is_suspended("a")
    assert status["phase"] == "Suspended"
    assert status["waitingFor"].startswith(f"waits for Kueue to admit it to {QUEUE}: couldn't")
    assert not cluster.nodes_of("a")

    cluster.set_queue(quotas={"fast": QUOTA})
    cluster.settle()
    assert cluster.status("a")["phase"] == "Running"
    assert cluster.nodes_of("a") >= {"node-fast"}
    assert condition_of(cluster.workload("a"), "PodsReady")["reason"] == "Started"

    body = cluster.workload("a")
    cluster.admitter.evict(body, "Preempted", "another one is more important")
    cluster.world.replace("workloads", NAMESPACE, body, "status")
    cluster.set_queue(is_stopped=True)
    cluster.settle()
    assert cluster.is_suspended("a")
    assert not cluster.world.assigned()
    assert not cluster.nodes_of("a")
    released = cluster.workload("a")
    assert "admission" not in released["status"]
    assert condition_of(released, "QuotaReserved") | {"lastTransitionTime": ""} == {
        "type": "QuotaReserved",
        "status": "False",
        "reason": "Pending",
        "message": "another one is more important",
        "observedGeneration": 1,
        "lastTransitionTime": "",
    }
    assert condition_of(released, "Admitted")["reason"] == "NoReservation"
    assert condition_of(released, "Requeued")["status"] == "True"
    assert "evicted (Preempted): another one" in cluster.status("a")["waitingFor"]

    cluster.set_queue(is_stopped=False)
    cluster.settle()
    assert cluster.status("a")["phase"] == "Running"
    cluster.end("a")
    cluster.settle()
    assert cluster.status("a")["phase"] == "Succeeded"
    assert condition_of(cluster.workload("a"), "Finished")["reason"] == "Succeeded"
    # Its two names of pods tell that it began twice.
    assert len(cluster.workloads("a")) == 1


def live(cluster: KueueCluster) -> None:
    """Queue, run, evict, run again and end; each step waits for nothing but its own effect."""
    cluster.settle(16)
    if cluster.world.objects.get("workloads") and not evicted(cluster):
        body = cluster.workload("a")
        if is_true(body, "Admitted"):
            cluster.admitter.evict(body, "Preempted", "others")
            cluster.world.replace("workloads", NAMESPACE, body, "status")
    cluster.settle(16)
    cluster.end("a")
    cluster.settle(16)


def evicted(cluster: KueueCluster) -> bool:
    """Whether it was evicted before."""
    return bool(condition_of(cluster.workload("a"), "Evicted"))


def the_end(cluster: KueueCluster) -> dict[str, Any]:
    body = cluster.workload("a")
    return {
        "phase": cluster.status("a")["phase"],
        "finished": condition_of(body, "Finished")["reason"],
        "workloads": cluster.workloads("a"),
        "assigned": cluster.world.assigned(),
        "running": [
            each for each in cluster.world.of("pods") if each["status"]["phase"] == "Running"
        ],
    }


@pytest.mark.parametrize("first", range(1, 5))
def test_a_process_that_is_killed_before_any_write_comes_to_the_same_end(first: int) -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=8)
    live(cluster)
    wanted, num_writes = the_end(cluster), cluster.process.connection.num_writes
    assert wanted["phase"] == "Succeeded"
    assert 20 < num_writes < MAX_WRITES_OF_A_LIFE

    for last in range(first, num_writes + 1, 4):
        cluster = KueueCluster()
        left = [last]

        def kill(method: str, plural: str, name: str, left: list[int] = left) -> str:
            left[0] -= method != "GET"
            if left[0] == 0 and method != "GET":
                raise NoWriteLeft
            return ""

        cluster.start(kill)
        cluster.submit("a", gpus=8)
        while True:
            try:
                live(cluster)
            except NoWriteLeft:
                cluster.start()
            else:
                break
        assert the_end(cluster) == wanted, f"killed before write {last}"


@pytest.mark.parametrize("fault", ["request", "answer"])
def test_a_write_that_is_lost_or_not_answered_comes_to_the_same_end(fault: str) -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=8)
    live(cluster)
    wanted, num_writes = the_end(cluster), cluster.process.connection.num_writes

    for last in range(1, num_writes + 1):
        cluster = KueueCluster()
        left = [last]

        def lose(method: str, plural: str, name: str, left: list[int] = left) -> str:
            left[0] -= method != "GET"
            return fault if left[0] == 0 and method != "GET" else ""

        cluster.start(lose)
        cluster.submit("a", gpus=8)
        while True:
            try:
                live(cluster)
            except ApiError:
                continue
            break
        assert the_end(cluster) == wanted, f"{fault} of write {last}"


@pytest.mark.parametrize("what", ["PATCH trainingjobs", "PUT workloads", "POST workloads"])
def test_a_write_that_arrives_late_undoes_nothing(what: str) -> None:
    cluster = KueueCluster()
    held: list[str] = []

    def hold(method: str, plural: str, name: str) -> str:
        if f"{method} {plural}" != what or held:
            return ""
        held.append(name)
        return "late"

    cluster.start(hold)
    cluster.submit("a", gpus=8)
    late = cluster.process.connection
    while True:
        try:
            live(cluster)
        except ApiError:
            continue
        break
    wanted = the_end(cluster)
    assert wanted["phase"] == "Succeeded"
    late.land()
    cluster.settle()
    assert the_end(cluster) == wanted


def test_the_queue_admits_one_of_two_jobs_and_then_the_other() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=8)
    cluster.submit("b", gpus=8)
    cluster.settle()
    assert [cluster.status(name)["phase"] for name in "ab"] == ["Running", "Suspended"]
    assert "insufficient unused quota for nvidia.com/gpu" in cluster.status("b")["waitingFor"]

    cluster.end("a")
    cluster.settle()
    assert cluster.status("b")["phase"] == "Running"


def test_a_higher_priority_of_a_workload_class_preempts() -> None:
    cluster = KueueCluster()
    urgent = {"metadata": {"name": "urgent"}, "value": 100}
    cluster.submit("low", gpus=8)
    cluster.settle()
    cluster.submit("high", gpus=8, priority="urgent")
    cluster.settle()
    assert cluster.status("high")["waitingFor"] == (
        "waits for the WorkloadPriorityClass urgent, which does not exist"
    )
    assert not cluster.workloads("high")

    cluster.world.create("workloadpriorityclasses", "", urgent)
    cluster.settle(24)
    assert cluster.status("high")["phase"] == "Running"
    assert cluster.is_suspended("low")
    assert cluster.workload("high")["spec"]["priorityClassRef"]["kind"] == "WorkloadPriorityClass"


def test_pods_run_on_nodes_of_their_flavor_alone() -> None:
    cluster = KueueCluster({"slow": {**QUOTA, GPU: "2"}, "fast": QUOTA})
    cluster.submit("small", gpus=1)
    cluster.submit("large", gpus=4)
    cluster.settle()
    assert cluster.nodes_of("small") == {"node-slow"}
    trainers = [
        pod for pod in cluster.world.of("pods") if pod["metadata"]["name"].startswith("large-tr")
    ]
    assert [pod["spec"]["nodeName"] for pod in trainers] == ["node-fast"]
    assert trainers[0]["spec"]["tolerations"][-1]["key"] == NODE_LABEL
    job = cluster.world.get("trainingjobs", NAMESPACE, "large")
    assert "template" not in job["spec"]["roles"]["trainer"], "its author's roles are not edited"


def test_a_deactivated_workload_says_what_to_do() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=8)
    cluster.settle()
    cluster.edit_workload("a", active=False)
    cluster.settle()
    name = cluster.workload("a")["metadata"]["name"]
    assert cluster.status("a")["waitingFor"] == (
        f"its Workload {name} is deactivated, so Kueue does not admit it to {QUEUE}: set "
        "spec.active of the Workload to true"
    )
    cluster.edit_workload("a", active=True)
    cluster.settle()
    assert cluster.status("a")["phase"] == "Running"


def test_a_running_job_of_another_size_is_queued_again() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=2)
    cluster.settle()
    uid = cluster.workload("a")["metadata"]["uid"]
    cluster.world.edit_trainer("a", replicas=3)
    cluster.settle(24)
    after = cluster.workload("a")
    assert after["metadata"]["uid"] != uid
    assert after["spec"]["podSets"][0]["count"] == 3
    assert cluster.status("a")["phase"] == "Running"
    assert cluster.world.assigned() == {"node-fast": 6}


def test_a_waiting_workload_follows_its_job_and_its_queue() -> None:
    cluster = KueueCluster(NONE_LEFT)
    cluster.submit("a", gpus=2)
    cluster.settle()
    uid = cluster.workload("a")["metadata"]["uid"]
    cluster.world.edit_trainer("a", gpus=4)
    cluster.label("a", {"kueue.x-k8s.io/queue-name": "other"})
    cluster.settle()
    after = cluster.workload("a")
    assert after["metadata"]["uid"] == uid
    assert after["spec"]["queueName"] == "other"
    requests = after["spec"]["podSets"][0]["template"]["spec"]["containers"][0]["resources"]
    assert requests["requests"][GPU] == "4"
    assert "LocalQueue other doesn't exist" in cluster.status("a")["waitingFor"]


def test_a_job_without_its_label_any_more_leaves_its_queue() -> None:
    cluster = KueueCluster(NONE_LEFT)
    cluster.submit("a", gpus=2)
    cluster.settle()
    cluster.label("a", {})
    cluster.settle()
    assert not cluster.workloads("a")
    assert cluster.status("a")["waitingFor"] == "suspended; set spec.suspend to false to go on"


def test_a_failed_job_that_is_tried_again_is_queued_again() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=8)
    cluster.world.edit("trainingjobs", "a", activeDeadlineSeconds=60)
    cluster.settle()
    first = cluster.workload("a")["metadata"]["uid"]
    cluster.world.now_s += 100
    cluster.settle()
    ended = cluster.status("a")
    assert ended["phase"] == "Failed"
    assert condition_of(cluster.workload("a"), "Finished")["reason"] == "Failed"

    body = cluster.world.get("trainingjobs", NAMESPACE, "a")
    body["metadata"]["annotations"] = {"tinsmith.dev/retry": ended["completionTime"]}
    cluster.world.store("trainingjobs", NAMESPACE, body)
    cluster.settle(24)
    assert cluster.workload("a")["metadata"]["uid"] != first
    assert cluster.status("a")["phase"] == "Running"


def test_players_that_are_done_give_their_quota_back() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=1)
    worker = {"replicas": 2, "template": {"command": ["play"]}, "resources": SMALL}
    roles = cluster.world.get("trainingjobs", NAMESPACE, "a")["spec"]["roles"]
    agents = [{"name": "red", "worker": worker}]
    cluster.world.edit("trainingjobs", "a", roles={**roles, "agents": agents})
    cluster.settle()
    assert cluster.status("a")["phase"] == "Running"
    for pod in cluster.world.of("pods"):
        if pod["metadata"]["name"].startswith("a-red-worker-0-"):
            cluster.world.succeed(pod)
    cluster.settle()
    status = cluster.workload("a")["status"]
    assert status["reclaimablePods"] == [{"name": "red-worker", "count": 1}]
    assert condition_of(cluster.workload("a"), "PodsReady")["status"] == "True"


def test_a_pod_that_is_replaced_is_told_as_a_recovery() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=1)
    cluster.settle()
    [trainer] = [each for each in cluster.world.of("pods") if "trainer" in each["metadata"]["name"]]
    cluster.world.delete("pods", NAMESPACE, trainer["metadata"]["name"])
    told = []
    for _ in range(12):
        cluster.settle(1)
        told.append(condition_of(cluster.workload("a"), "PodsReady")["reason"])
    assert list(dict.fromkeys(told)) == ["Started", "WaitForRecovery", "Recovered"]


def test_a_running_job_does_not_wait_for_kueue_to_hear_of_it() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=1)
    cluster.settle()
    # As while the webhooks of Kueue are down.
    cluster.start(lambda method, plural, name: "request" if plural == "workloads" else "")
    [trainer] = [each for each in cluster.world.of("pods") if "trainer" in each["metadata"]["name"]]
    cluster.world.delete("pods", NAMESPACE, trainer["metadata"]["name"])
    cluster.settle()
    assert cluster.status("a")["phase"] == "Running"
    cluster.end("a")
    cluster.settle()
    assert cluster.status("a")["phase"] == "Succeeded"
    assert not condition_of(cluster.workload("a"), "Finished")

    cluster.start()
    cluster.settle()
    assert condition_of(cluster.workload("a"), "Finished")["reason"] == "Succeeded"


def test_tinsmiths_own_queues_do_not_count(tmp_path: Path) -> None:
    queues = tmp_path / "queues.toml"
    queues.write_text("[queues.default]\n")
    cluster = KueueCluster()
    cluster.start(queues=queues)
    cluster.submit("a", gpus=8, queueName="nobody-has-this")
    cluster.settle()
    assert cluster.status("a")["phase"] == "Running"


def test_a_cancelled_job_is_finished_for_kueue() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=8)
    cluster.settle()
    cluster.world.edit("trainingjobs", "a", cancel=True)
    cluster.settle()
    assert cluster.status("a")["phase"] == "Cancelled"
    assert condition_of(cluster.workload("a"), "Finished")["reason"] == "Failed"


def test_a_deleted_workload_is_made_anew_once_nothing_runs() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=8)
    cluster.settle()
    name = cluster.workloads("a")[0]
    uid = cluster.workload("a")["metadata"]["uid"]
    cluster.world.delete("workloads", NAMESPACE, name)
    cluster.settle(24)
    assert cluster.workload("a")["metadata"]["uid"] != uid
    assert cluster.status("a")["phase"] == "Running"


def test_a_flavor_that_is_not_there_is_waited_for() -> None:
    cluster = KueueCluster()
    cluster.world.delete("resourceflavors", "", "fast")
    cluster.submit("a", gpus=8)
    cluster.settle()
    assert cluster.status("a")["waitingFor"] == (
        "waits for the ResourceFlavor fast, which is not there"
    )
    assert not cluster.world.assigned()
    cluster.world.create("resourceflavors", "", cluster.flavors[1])
    cluster.settle()
    assert cluster.status("a")["phase"] == "Running"


def test_an_admission_check_is_waited_for() -> None:
    cluster = KueueCluster()
    cluster.set_queue(checks=("capacity",))
    cluster.submit("a", gpus=8)
    cluster.settle()
    assert cluster.is_suspended("a")
    assert "the admission check capacity is Pending" in cluster.status("a")["waitingFor"]
    body = cluster.workload("a")
    body["status"]["admissionChecks"][0]["state"] = "Ready"
    cluster.world.replace("workloads", NAMESPACE, body, "status")
    cluster.settle()
    assert cluster.status("a")["phase"] == "Running"


def test_what_its_author_resumes_kueue_suspends_and_no_pod_is_made() -> None:
    cluster = KueueCluster(NONE_LEFT)
    cluster.submit("a", gpus=8)
    cluster.settle()
    cluster.world.edit("trainingjobs", "a", suspend=False)
    cluster.settle()
    assert cluster.is_suspended("a")
    assert not cluster.world.of("pods")


@pytest.mark.parametrize("num_agents", [9])
def test_more_roles_than_a_workload_holds_are_refused(num_agents: int) -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=1)
    agents = [{"name": f"p{number}", "trainer": {"gpus": 1}} for number in range(num_agents)]
    roles = cluster.world.get("trainingjobs", NAMESPACE, "a")["spec"]["roles"]
    cluster.world.edit("trainingjobs", "a", roles={**roles, "agents": agents})
    cluster.settle()
    assert "a Workload of Kueue holds at most 8" in cluster.status("a")["failure"]["message"]
    assert not cluster.workloads("a")


def requests_of(workload: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return what a pod of each pod set requests."""
    return {
        pod_set["name"]: pod_set["template"]["spec"]["containers"][0]["resources"]["requests"]
        for pod_set in workload["spec"]["podSets"]
    }


def test_amounts_that_kueue_writes_in_another_form_are_the_same() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=8)
    cluster.settle()
    body = cluster.workload("a")
    for requests in requests_of(body).values():
        for name, text in requests.items():
            requests[name] = f"{parse_quantity(text) * 1000:f}m"
    cluster.world.store("workloads", NAMESPACE, body)

    cluster.settle()

    assert cluster.status("a")["phase"] == "Running"
    assert cluster.workload("a")["metadata"]["uid"] == body["metadata"]["uid"]


def test_other_defaults_of_a_release_stop_no_job_that_was_admitted() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=8)
    cluster.world.edit_trainer("a", resources={})
    cluster.settle()
    assert cluster.status("a")["phase"] == "Running"
    body = cluster.workload("a")
    requests_of(body)["trainer"]["memory"] = "3Gi"
    cluster.world.store("workloads", NAMESPACE, body)

    cluster.settle()

    assert cluster.status("a")["phase"] == "Running"
    assert cluster.workload("a")["metadata"]["uid"] == body["metadata"]["uid"]


def test_a_job_that_loses_its_label_while_it_runs_obeys_until_it_has_stopped() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=8)
    cluster.settle()
    cluster.label("a", {})
    cluster.settle()
    assert cluster.status("a")["phase"] == "Running"
    body = cluster.workload("a")
    cluster.admitter.evict(body, "Preempted", "others")
    cluster.world.replace("workloads", NAMESPACE, body, "status")

    cluster.settle()

    assert cluster.status("a")["phase"] == "Suspended"
    assert not cluster.workloads("a")
