"""What brings data of an object store into the pod of a driver, which has no keys of the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tinsmith_controller.pods.deployment import Deployment
from tinsmith_controller.pods.pod_env import TERMINATION_LOG, store_env
from tinsmith_controller.pods.pod_volumes import JOB_DATA, data_path
from tinsmith_controller.pods.template_parts import SECURITY
from tinsmith_jobs.naming import DATA_CONTAINER
from tinsmith_jobs.quantities import parse_quantity
from tinsmith_jobs.spec import DRIVER, TRAINER, JobSpec, PoolSpec, Role

_PROGRAM = "tinsmith_runtime.pod.fetch"


def data_fetch(
    spec: JobSpec | PoolSpec, role: Role, resources: Mapping[str, Any], deployment: Deployment
) -> list[dict[str, Any]]:
    """Return the init container that fetches the data of a job; empty if it has none to fetch.

    Args:
        spec: Of the workload.
        role: Whose pod is made.
        resources: Of its own container, without GPUs; see `template_parts.init_containers`.
        deployment: Its trainers' image has a client of object stores.
    """
    if role.kind != DRIVER or not isinstance(spec, JobSpec) or not spec.data.object:
        return []
    # Read as the check of its settings reads it.
    settings = urlsplit(spec.checkpoint.uri).query
    uri = f"{spec.data.object}?{settings}" if settings else spec.data.object
    max_bytes = str(int(parse_quantity(deployment.volume_size)))
    words = ("python", "-m", _PROGRAM, uri, data_path(spec.data), max_bytes)
    fetching: dict[str, Any] = {
        "name": DATA_CONTAINER,
        "image": f"{deployment.image_repository}/{TRAINER}:{deployment.image_tag}",
        # Kubernetes would replace `$(NAME)` by a variable.
        "command": [word.replace("$", "$$") for word in words],
        "env": [TERMINATION_LOG, *store_env(spec)],
        "resources": resources,
        # Nothing that an author's program could have written before it was started again.
        "volumeMounts": [{"name": "job-data", "mountPath": JOB_DATA}],
        "securityContext": SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return [fetching]
