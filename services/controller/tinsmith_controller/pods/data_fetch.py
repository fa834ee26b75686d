"""What brings data of an object store into the pod of a driver, which has no keys of the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tinsmith_controller.pods.deployment import Deployment
from tinsmith_controller.pods.pod_env import store_env
from tinsmith_controller.pods.pod_volumes import JOB_DATA, data_path
from tinsmith_controller.pods.template_parts import SECURITY
from tinsmith_jobs.naming import is_key_secret
from tinsmith_jobs.quantities import parse_quantity
from tinsmith_jobs.spec import DRIVER, TRAINER, JobSpec, PoolSpec, Role

_NAME = "tinsmith-data"


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
    most = str(int(parse_quantity(deployment.volume_size)))
    module = "tinsmith_runtime.storage.fetch"
    words = ("python", "-m", module, uri, data_path(spec.data), most)
    fetching: dict[str, Any] = {
        "name": _NAME,
        "image": f"{deployment.image_repository}/{TRAINER}:{deployment.image_tag}",
        # Kubernetes would replace `$(NAME)` by a variable.
        "command": [word.replace("$", "$$") for word in words],
        "env": store_env(spec),
        "resources": resources,
        # Nothing that an author's program could have written before it was started again.
        "volumeMounts": [{"name": "job-data", "mountPath": JOB_DATA}],
        "securityContext": SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return [fetching]


def check_data_keys(job: JobSpec, deployment: Deployment) -> str:
    """Return why the data of a job may not be fetched; empty if it may.

    Its author reads what the keys open, whatever images the operators trust.
    """
    secret = job.checkpoint.secret
    if not job.data.object or not (secret in deployment.own_secrets() or is_key_secret(secret)):
        return ""
    return (
        f"spec.data.name may not be read with the Secret {secret} of the deployment; give "
        "spec.checkpoint a bucket and a Secret of the job's own"
    )
