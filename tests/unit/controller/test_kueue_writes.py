"""What is written about a job in a queue of Kueue, look by look."""

from __future__ import annotations

import pytest
from tests.fakes.kueue_admitter import condition_of
from tests.unit.controller.assignment_cases import NOW, ago
from tests.unit.controller.kueue_in_memory import KueueCluster

from tinsmith_controller.kube.api_client import Json
from tinsmith_controller.kueue.workload_record import kueue_workload
from tinsmith_controller.kueue.workload_status import released
from tinsmith_jobs.status_codec import encode_time


def test_each_look_goes_on_from_what_the_one_before_wrote() -> None:
    """No watch tells of the writes: what they answered is known."""
    cluster = KueueCluster()
    process = cluster.process
    cluster.submit("a", gpus=8)
    process.deliver("trainingjobs")

    assert process.attempt(lambda: process.look("a")) == ""
    assert cluster.is_suspended("a")
    assert not cluster.workloads("a")
    assert process.attempt(lambda: process.look("a")) == ""
    assert cluster.workloads("a")

    cluster.step_kueue()
    process.deliver("workloads")
    assert process.attempt(lambda: process.look("a")) == ""
    assert not cluster.is_suspended("a")
    assert process.attempt(lambda: process.look("a")) == ""
    assert not cluster.is_suspended("a")


def evicted(reason: str, *others: str) -> Json:
    """Return a Workload that was evicted, with other conditions that are true for a minute."""
    conditions = [
        {"type": kind, "status": "True", "reason": "Any", "message": "m"} for kind in others
    ]
    conditions.append({"type": "Evicted", "status": "True", "reason": reason, "message": "why"})
    for condition in conditions:
        condition["lastTransitionTime"] = encode_time(ago(60))
    status = {
        "conditions": conditions,
        "admission": {"clusterQueue": "q"},
        "reclaimablePods": [{"name": "driver", "count": 1}],
        "accumulatedPastExecutionTimeSeconds": 7,
    }
    return {"metadata": {"name": "w", "namespace": "n", "generation": 3}, "status": status}


def state_of(body: Json, kind: str) -> tuple[str, str]:
    found = condition_of(body, kind)
    return found["status"], found["reason"]


def test_what_gives_its_quota_back_counts_its_time_and_waits_for_its_pods_anew() -> None:
    workload = kueue_workload(evicted("Preempted", "QuotaReserved", "Admitted", "PodsReady"))
    body = released(workload, NOW)
    assert state_of(body, "QuotaReserved") == ("False", "Pending")
    assert state_of(body, "Admitted") == ("False", "NoReservation")
    assert state_of(body, "PodsReady") == ("False", "WaitForStart")
    assert body["status"]["accumulatedPastExecutionTimeSeconds"] == 67
    assert not body["status"].keys() & {"admission", "reclaimablePods"}


def test_what_was_never_admitted_is_told_nothing_of_admission_and_pods() -> None:
    body = released(kueue_workload(evicted("Preempted", "QuotaReserved")), NOW)
    assert {entry["type"] for entry in body["status"]["conditions"]} == {
        "Evicted",
        "QuotaReserved",
        "Requeued",
    }
    assert body["status"]["accumulatedPastExecutionTimeSeconds"] == 7


@pytest.mark.parametrize(
    ("reason", "is_queued"),
    [("Preempted", "True"), ("NodeFailures", "True"), ("PodsReadyTimeout", "False")],
)
def test_kueue_says_when_a_workload_is_queued_again_but_for_what_is_no_fault_of_its_own(
    reason: str, is_queued: str
) -> None:
    body = released(kueue_workload(evicted(reason)), NOW)
    assert state_of(body, "Requeued") == (is_queued, reason)
