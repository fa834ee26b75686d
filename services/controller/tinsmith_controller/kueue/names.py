"""Names of Kueue's protocol, and those that a job and its roles have in it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from tinsmith_jobs.naming import GROUP, JOB_KIND, flat_role
from tinsmith_jobs.spec import Role

KUEUE_GROUP = "kueue.x-k8s.io"
KUEUE_VERSION = "v1beta2"
"""Served by Kueue 0.15 and later; v1beta1 is served by 0.19 and earlier."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Of a job: the LocalQueue that decides when it runs."""
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
"""Of a job: a WorkloadPriorityClass, which counts before its PriorityClass."""
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
"""Of a Workload."""
MAX_POD_SETS = 8
"""Roles with pods that one Workload can describe."""

_MAX_NAME = 63
"""Characters of names, so that they are values of labels too."""
_HASH_LENGTH = 5
_NOT_IN_NAMES = re.compile(r"[^a-z0-9-]+")


def workload_name(job: str, uid: str) -> str:
    """Return the name of the Workload of a job; Kueue's own integrations name theirs alike."""
    parts = (JOB_KIND, GROUP, job, uid)
    digest = hashlib.sha1("\n".join(parts).encode(), usedforsecurity=False).hexdigest()
    readable = f"{JOB_KIND.lower()}-{job}"[: _MAX_NAME - 1 - _HASH_LENGTH]
    return f"{readable}-{digest[:_HASH_LENGTH]}"


def pod_set_names(roles: Sequence[Role]) -> dict[str, str]:
    """Return the pod set of each role that has pods, by the name of the role.

    A name that is too long, or that another role has already, ends in a hash.
    """
    found: dict[str, str] = {}
    for role in roles:
        if not role.replicas:
            continue
        name = _NOT_IN_NAMES.sub("-", flat_role(role.name).lower()).strip("-")
        if not name or len(name) > _MAX_NAME or name in found.values():
            digest = hashlib.sha256(role.name.encode()).hexdigest()[:_HASH_LENGTH]
            name = f"{name[: _MAX_NAME - 1 - _HASH_LENGTH]}-{digest}".lstrip("-")
        found[role.name] = name
    return found


def too_many_roles(roles: Sequence[Role]) -> str:
    """Return why no Workload can describe a job, in one sentence; empty if one can."""
    num_roles = len(pod_set_names(roles))
    if not num_roles:
        return "the job has no pods, so Kueue has nothing to queue: drop the label of its queue"
    if num_roles > MAX_POD_SETS:
        return (
            f"the job has {num_roles} roles with pods, and a Workload of Kueue holds at most "
            f"{MAX_POD_SETS}: give agents common pods, or drop the label of Kueue's queue"
        )
    return ""
