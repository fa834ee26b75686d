"""Plays Kueue's part of the protocol of Workloads: quota, flavors, eviction and preemption.

No Kueue can be had where the tests run. What it writes into a status is taken from the sources of
Kueue 0.20 (`pkg/workload`, `pkg/scheduler`). Of one ClusterQueue for each LocalQueue it knows the
quota of each flavor, in order. The queue is best-effort FIFO, and higher priorities preempt.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith_jobs.quantities import parse_quantity

Json = dict[str, Any]
Usage = dict[tuple[str, str], float]
"""Amounts by flavor and resource."""


@dataclass(frozen=True, kw_only=True)
class FakeQueue:
    """A LocalQueue with its ClusterQueue.

    Attributes:
        quotas: Quota by resource, by flavor in the order in which they are tried.
        checks: Admission checks that a test settles itself.
        is_stopped: Whether it admits nothing and has evicted all.
    """

    quotas: Mapping[str, Mapping[str, str]]
    checks: Sequence[str] = ()
    is_stopped: bool = False


class KueueAdmitter:
    """Decides about Workloads.

    Attributes:
        queues: Queues by name.
        flavors: The ResourceFlavors by name, as the API server has them.
    """

    def __init__(
        self,
        queues: Mapping[str, FakeQueue],
        flavors: Iterable[Json],
        now: Callable[[], datetime.datetime],
    ) -> None:
        self.queues = dict(queues)
        self.flavors = {flavor["metadata"]["name"]: flavor for flavor in flavors}
        self._now = now

    def step(self, workloads: Iterable[Json]) -> list[Json]:
        """Return the Workloads whose status it changes, with the new one."""
        old = [
            copy.deepcopy(each) for each in workloads if "deletionTimestamp" not in each["metadata"]
        ]
        new = copy.deepcopy(old)
        for workload in new:
            self._evict_if_told(workload)
        waiting = [each for each in new if self._is_pending(each)]
        for workload in sorted(waiting, key=_order):
            self._admit(workload, new)
        for workload in new:
            self._settle_admission(workload)
        return [after for before, after in zip(old, new, strict=True) if before != after]

    def evict(self, workload: Json, reason: str, message: str) -> None:
        """Tell a Workload to give its quota back."""
        self.set(workload, "Evicted", True, reason, message)

    def set(self, workload: Json, kind: str, is_true: bool, reason: str, message: str) -> None:
        """Set a condition."""
        status = "True" if is_true else "False"
        conditions = workload.setdefault("status", {}).setdefault("conditions", [])
        entry = next((each for each in conditions if each["type"] == kind), None)
        if entry is None:
            entry = {"type": kind, "status": ""}
            conditions.append(entry)
        if entry["status"] != status:
            entry["lastTransitionTime"] = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        entry |= {"status": status, "reason": reason, "message": message}

    def _evict_if_told(self, workload: Json) -> None:
        if not is_true(workload, "QuotaReserved") or is_true(workload, "Finished"):
            return
        queue = self.queues.get(workload["spec"]["queueName"])
        if is_true(workload, "Evicted"):
            return
        if workload["spec"].get("active") is False:
            self.evict(workload, "Deactivated", "The workload is deactivated")
        elif queue is not None and queue.is_stopped:
            self.evict(workload, "ClusterQueueStopped", "The ClusterQueue is stopped")

    def _is_pending(self, workload: Json) -> bool:
        if is_true(workload, "QuotaReserved") or is_true(workload, "Finished"):
            return False
        name = workload["spec"]["queueName"]
        if workload["spec"].get("active") is False:
            self.set(workload, "QuotaReserved", False, "Pending", "The workload is deactivated")
            return False
        if name not in self.queues:
            told = f"LocalQueue {name} doesn't exist"
            self.set(workload, "QuotaReserved", False, "Inadmissible", told)
            return False
        return not self.queues[name].is_stopped

    def _admit(self, workload: Json, all_of_them: Sequence[Json]) -> None:
        name = workload["spec"]["queueName"]
        rest = [each for each in all_of_them if each["spec"]["queueName"] == name]
        used = _usage(each for each in rest if is_true(each, "QuotaReserved"))
        found, problem = self._fit(workload, used)
        if found is not None:
            self._reserve(workload, found)
            return
        if preempted := self._victims(workload, rest):
            for victim in preempted:
                told = f"Preempted to accommodate a workload (UID: {workload['metadata']['uid']})"
                self.evict(victim, "Preempted", told)
                self.set(victim, "Preempted", True, "InClusterQueue", told)
            problem += f". Pending the preemption of {len(preempted)} workload(s)"
        self.set(workload, "QuotaReserved", False, "Pending", problem)

    def _victims(self, workload: Json, rest: Sequence[Json]) -> list[Json]:
        """Return the Workloads of lower priority whose end makes room, the lowest first."""
        holding = [each for each in rest if is_true(each, "QuotaReserved")]
        # What is on its way out makes room by and by.
        staying = [each for each in holding if not is_true(each, "Evicted")]
        if self._fit(workload, _usage(staying))[0] is not None:
            return []
        lower = [each for each in staying if _priority(each) < _priority(workload)]
        chosen: list[Json] = []
        for victim in sorted(lower, key=_order, reverse=True):
            chosen.append(victim)
            left = [each for each in staying if each not in chosen]
            if self._fit(workload, _usage(left))[0] is not None:
                return chosen
        return []

    def _fit(self, workload: Json, used: Usage) -> tuple[list[Json] | None, str]:
        """Return the assignments of all pod sets, or why there are none."""
        taken, found = dict(used), []
        for pod_set in workload["spec"]["podSets"]:
            amounts = _requests(pod_set, pod_set["count"])
            name, problem = self._flavor_for(workload, pod_set, amounts, taken)
            if not name:
                told = f"couldn't assign flavors to pod set {pod_set['name']}: {problem}"
                return None, told
            for resource, amount in amounts.items():
                key = (name, resource)
                taken[key] = taken.get(key, 0) + amount
            found.append(
                {
                    "name": pod_set["name"],
                    "flavors": dict.fromkeys(amounts, name),
                    "resourceUsage": {key: str(amount) for key, amount in amounts.items()},
                    "count": pod_set["count"],
                }
            )
        return found, ""

    def _flavor_for(
        self, workload: Json, pod_set: Json, amounts: Mapping[str, float], taken: Usage
    ) -> tuple[str, str]:
        problems = []
        quotas = self.queues[workload["spec"]["queueName"]].quotas
        for name, quota in quotas.items():
            if not self._matches(name, pod_set):
                problems.append(f"flavor {name} doesn't match node affinity")
                continue
            lacking = [
                resource
                for resource, amount in amounts.items()
                if taken.get((name, resource), 0) + amount
                > parse_quantity(quota.get(resource, "0"))
            ]
            if not lacking:
                return name, ""
            problems.append(f"insufficient unused quota for {lacking[0]} in flavor {name}")
        return "", ", ".join(problems)

    def _matches(self, name: str, pod_set: Json) -> bool:
        labels = self.flavors[name]["spec"].get("nodeLabels", {})
        selector = pod_set["template"]["spec"].get("nodeSelector", {})
        return all(selector.get(key, value) == value for key, value in labels.items())

    def _reserve(self, workload: Json, assignments: list[Json]) -> None:
        name = workload["spec"]["queueName"]
        told = f"Quota reserved in ClusterQueue {name}"
        self.set(workload, "QuotaReserved", True, "QuotaReserved", told)
        workload["status"]["admission"] = {"clusterQueue": name, "podSetAssignments": assignments}
        if checks := self.queues[name].checks:
            workload["status"]["admissionChecks"] = [
                {
                    "name": check,
                    "state": "Pending",
                    "message": "",
                    "lastTransitionTime": self._now().strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
                for check in checks
            ]
        for kind in ("Evicted", "Preempted"):
            if is_true(workload, kind):
                self.set(workload, kind, False, "QuotaReserved", "Previously: it was evicted")

    def _settle_admission(self, workload: Json) -> None:
        checks = workload.get("status", {}).get("admissionChecks", [])
        is_ready = all(check["state"] == "Ready" for check in checks)
        if is_true(workload, "QuotaReserved") and is_ready and not is_true(workload, "Admitted"):
            self.set(workload, "Admitted", True, "Admitted", "The workload is admitted")


def is_true(workload: Json, kind: str) -> bool:
    """Whether a condition is true."""
    conditions = workload.get("status", {}).get("conditions", [])
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def condition_of(workload: Json, kind: str) -> Json:
    """Return a condition; empty if there is none."""
    conditions = workload.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


def _priority(workload: Json) -> int:
    return int(workload["spec"].get("priority", 0))


def _order(workload: Json) -> tuple[int, str, str]:
    metadata = workload["metadata"]
    return -_priority(workload), metadata["creationTimestamp"], metadata["uid"]


def _requests(pod_set: Json, count: int) -> dict[str, float]:
    requests = pod_set["template"]["spec"]["containers"][0]["resources"]["requests"]
    return {name: float(parse_quantity(text)) * count for name, text in requests.items()}


def _usage(workloads: Iterable[Json]) -> Usage:
    """Return what Workloads count against flavors, without pods that are done."""
    used: Usage = {}
    for workload in workloads:
        if is_true(workload, "Finished"):
            continue
        status = workload["status"]
        done = {each["name"]: each["count"] for each in status.get("reclaimablePods", [])}
        given = {each["name"]: each for each in status["admission"]["podSetAssignments"]}
        for pod_set in workload["spec"]["podSets"]:
            count = pod_set["count"] - done.get(pod_set["name"], 0)
            for resource, amount in _requests(pod_set, count).items():
                key = (given[pod_set["name"]]["flavors"][resource], resource)
                used[key] = used.get(key, 0) + amount
    return used
