"""Names of objects, pods, secrets and workers; the same inputs give the same name, always."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from tinsmith.names import agent_pool
from tinsmith_jobs.spec import DRIVER, SAMPLER

GROUP = "tinsmith.dev"
VERSION = "v1alpha1"

JOB_KIND = "TrainingJob"
POOL_KIND = "TrainerPool"

# Labels of everything that belongs to a workload.
KIND_LABEL = "tinsmith.dev/kind"
WORKLOAD_LABEL = "tinsmith.dev/workload"
UID_LABEL = "tinsmith.dev/uid"
ROLE_LABEL = "tinsmith.dev/role"
INDEX_LABEL = "tinsmith.dev/index"
EPOCH_LABEL = "tinsmith.dev/epoch"
COMPONENT_LABEL = "app.kubernetes.io/component"
"""The kind of a pod's role; network policies of the chart select by it."""
TEMPLATE_ANNOTATION = "tinsmith.dev/template"
"""Hash of what a pod was made from; another one means that it is out of date."""
RETRY_ANNOTATION = "tinsmith.dev/retry"
"""Of a job: the `completionTime` of the failure that is to be undone."""
MANAGED_LABEL = "app.kubernetes.io/managed-by"
MANAGER = "tinsmith-controller"

POD_PATHS = {
    "tmp": "/tmp",
    "data": "/data",
    "models": "/models",
    "cache": "/cache",
    "shm": "/dev/shm",
    "job-data": "/job-data",
    "certificates": "/certificates",
    "storage": "/storage",
}
"""Where pods find the volumes of Tinsmith itself, by name. Other volumes are mounted elsewhere.

`data` is what a pod keeps while it lives, `cache` what was fetched from a hub, and `certificates`
what it shows to other pods. `storage` is the deployment's claim with all checkpoints.
"""

DATA_CONTAINER = "tinsmith-data"
"""The init container of a driver that fetches data of a bucket."""

_LONGEST_READABLE = 48
_HASH_LENGTH = 12
_KEY_SECRET = re.compile(rf"-(pod-keys|agents-key|{DRIVER}-key-e\d+)$")
"""Earlier releases made a Secret for each driver and one for the agents; some may be left."""


@dataclass(frozen=True, slots=True, order=True)
class NamespacedName:
    """Names an object of the cluster."""

    kind: str
    """`TrainingJob` or `TrainerPool`."""
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def controller_reference(key: NamespacedName, uid: str) -> dict[str, Any]:
    """Return the reference by which the cluster deletes things with their workload."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": key.kind,
        "name": key.name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def pod_name(workload: str, role: str, index: int, epoch: int) -> str:
    """Return the name of a pod; the epoch makes the name new."""
    return f"{workload}-{flat_role(role)}-{index}-e{epoch}"


def flat_role(role: str) -> str:
    """Return a role as a part of names: `agent/red/trainer` is `red-trainer`."""
    return role.removeprefix("agent/").replace("/", "-")


def service_name(workload: str, role: str) -> str:
    """Return the name of the headless service of a role."""
    return f"job-{workload}-{flat_role(role)}"


def pod_keys_name(workload: str) -> str:
    """Return the name of the secret with the keys of a workload's pods, each in its own entry."""
    return f"{workload}-pod-keys"


def is_key_secret(name: str) -> bool:
    """Whether a secret of this name may hold keys of a workload, whichever it is."""
    return _KEY_SECRET.search(name) is not None


def pool_id(workload: str, uid: str, agent: str = "") -> str:
    """Return the name of a job's pool at the scheduler, or of an agent's within it.

    A job made anew has another.
    """
    pool = f"{workload}.{_digest(uid)}"
    return agent_pool(pool, agent) if agent else pool


def key_entry(epoch: int | None, agent: str = "") -> str:
    """Return which entry of the secret with keys is one that a client of a job calls with.

    A driver whose key was replaced finds no entry, rather than the key of the next one.

    Args:
        epoch: That of the driver whose key it is; None are the agents' workers.
        agent: The agent whose key it is; empty is the job's own.
    """
    holder = "workers" if epoch is None else f"{DRIVER}-e{epoch}"
    return f"{holder}.agent-{agent}" if agent else f"{holder}.api-key"


def worker_id(workload: str, uid: str, role: str, index: int) -> str:
    """Return the identity of a pod at the scheduler: the same for all that succeed each other."""
    readable = f"{workload}.{flat_role(role)}-{index}"[:_LONGEST_READABLE]
    return f"{readable}.{_digest(f'{uid}/{role}/{index}')}"


def sampler_selector(kind: str, workload: str) -> str:
    """Return the label selector of a workload's samplers, for an autoscaler.

    It names the kind too, because a job and a pool may have the same name.
    """
    return f"{KIND_LABEL}={kind},{WORKLOAD_LABEL}={workload},{ROLE_LABEL}={SAMPLER}"


def job_resource(project: str, job: str) -> str:
    """Return the name that a job has in the contract."""
    return f"projects/{project}/trainingJobs/{job}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
