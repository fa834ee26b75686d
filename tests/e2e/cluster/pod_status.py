"""The status of pods, as kubelets write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.e2e.cluster.api import Json
from tests.e2e.cluster.nodes import timestamp


@dataclass(slots=True)
class ContainerState:
    """What is known of one container.

    Attributes:
        state: `waiting`, `running` or `terminated` with its details.
        last: The state in which the run before ended.
    """

    name: str
    image: str
    state: Json = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last: Json = field(default_factory=dict)
    num_restarts: int = 0
    is_ready: bool = False
    is_started: bool = False

    @property
    def is_running(self) -> bool:
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        """The code with which it ended for good or until its next start; None before that."""
        ended = self.state.get("terminated") or (
            self.last.get("terminated") if "waiting" in self.state else None
        )
        return None if ended is None else int(ended["exitCode"])

    def as_json(self) -> Json:
        """Return the entry of `containerStatuses`."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": "",
            "state": self.state,
            "lastState": self.last,
            "restartCount": self.num_restarts,
            "ready": self.is_ready,
            "started": self.is_started,
        }


def terminated(code: int, started_at: str, message: str = "", reason: str = "") -> Json:
    """Return the state of a container that ended."""
    ended: Json = {
        "exitCode": code,
        "reason": reason or ("Completed" if code == 0 else "Error"),
        "startedAt": started_at,
        "finishedAt": timestamp(),
    }
    if message:
        ended["message"] = message
    return {"terminated": ended}


def should_restart(policy: str, code: int) -> bool:
    """Say whether a container that ended is started again."""
    return policy == "Always" or (policy == "OnFailure" and code != 0)


def phase(policy: str, init: Sequence[ContainerState], main: Sequence[ContainerState]) -> str:
    """Return the phase of a pod; `policy` is its restart policy."""
    if any(c.exit_code not in (0, None) and policy == "Never" for c in init):
        return "Failed"
    if any("terminated" not in c.state for c in init):
        return "Pending"
    ended = [c.state["terminated"]["exitCode"] for c in main if "terminated" in c.state]
    if len(ended) == len(main) and not any(should_restart(policy, code) for code in ended):
        return "Succeeded" if not any(ended) else "Failed"
    started = any(c.is_running or c.exit_code is not None for c in main)
    return "Running" if started else "Pending"


def pod_status(
    pod: Json, address: str, init: Sequence[ContainerState], main: Sequence[ContainerState]
) -> Json:
    """Return what a kubelet writes into the status of a pod."""
    policy = pod["spec"].get("restartPolicy", "Always")
    now = phase(policy, init, main)
    initialized = all(c.exit_code == 0 for c in init)
    ready = now == "Running" and all(c.is_ready for c in main)
    known = {c["type"]: c for c in pod.get("status", {}).get("conditions", [])}
    reason = "PodCompleted" if now in ("Succeeded", "Failed") else "ContainersNotReady"
    status: Json = {
        "phase": now,
        "startTime": pod["metadata"]["creationTimestamp"],
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [
            condition(known, "Initialized", initialized, "ContainersNotInitialized"),
            condition(known, "ContainersReady", ready, reason),
            condition(known, "Ready", ready, reason),
        ],
        "containerStatuses": [c.as_json() for c in main],
    }
    if init:
        status["initContainerStatuses"] = [c.as_json() for c in init]
    return status


def condition(known: Mapping[str, Json], kind: str, is_true: bool, reason: str) -> Json:
    """Return a condition; it keeps the time of its last change if it does not change."""
    status = "True" if is_true else "False"
    before = known.get(kind, {})
    changed_at = before.get("lastTransitionTime") if before.get("status") == status else None
    return {
        "type": kind,
        "status": status,
        "reason": None if is_true else reason,
        "lastTransitionTime": changed_at or timestamp(),
    }
