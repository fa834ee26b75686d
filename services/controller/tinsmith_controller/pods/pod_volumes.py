"""Volumes of a pod: the sources of its files, and their mount paths."""

from __future__ import annotations

from typing import Any

from tinsmith_controller.pods.deployment import PORTS, Deployment
from tinsmith_controller.pods.workload_context import WorkloadContext
from tinsmith_jobs.naming import POD_PATHS
from tinsmith_jobs.spec import (
    COORDINATOR,
    DRIVER,
    SAMPLER,
    TRAINER,
    VLLM,
    Data,
    JobSpec,
    Model,
    Role,
)

DATA = POD_PATHS["data"]
CACHE = POD_PATHS["cache"]
CERTIFICATES = POD_PATHS["certificates"]
_MODELS = POD_PATHS["models"]
JOB_DATA = POD_PATHS["job-data"]
_READ_ONLY = ("models", "job-data", "certificates")


def model_path(model: Model) -> str:
    """Return what a trainer is told: a directory in its pod, or an id of the hub."""
    scheme, _, rest = model.source.partition("://")
    if scheme == "pvc":
        return f"{_MODELS}/{rest.partition('/')[2]}"
    return rest


def data_path(data: Data) -> str:
    """Return where a driver finds what it trains on, or its name; empty if it brings its own."""
    if data.config_map:
        return f"{JOB_DATA}/{data.config_map_key}"
    if data.claim:
        return f"{JOB_DATA}/{data.claim_path}"
    if data.object:
        return f"{JOB_DATA}/{data.object.rpartition('/')[2]}"
    return data.name


def volumes_of(owner: WorkloadContext, role: Role, deployment: Deployment) -> list[dict[str, Any]]:
    """Return the volumes of a pod."""
    # A pod beyond the size of a volume is ended by its kubelet; without one it fills the node, and
    # pods of others are.
    volumes = [_scratch("tmp", deployment.volume_size)]
    if deployment.certificate_secrets and role.kind in PORTS:
        name = f"{deployment.certificate_secrets}-{role.kind}"
        volumes.append({"name": "certificates", "secret": {"secretName": name}})
    if role.kind in (TRAINER, COORDINATOR):
        volumes.append(_scratch("data", deployment.volume_size))
    model = owner.spec.model_of(role)
    if role.kind in (TRAINER, SAMPLER) and model is not None:
        if model.source.startswith("pvc://"):
            claim = model.source.removeprefix("pvc://").partition("/")[0]
            volumes.append(_claim("models", claim, is_read_only=True))
        if model.source.startswith("hf://"):
            cache = model.cache_claim
            volumes.append(
                _claim("cache", cache, is_read_only=False)
                if cache
                else _scratch("cache", deployment.cache_size)
            )
        if role.gpus > 1 or role.engine == VLLM:
            # torch's data exchange between the ranks of a pod, and versions of weights that vLLM
            # reads; the default is 64 MiB. It counts as memory of the pod, whose limit bounds it.
            volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        has_own_store = isinstance(owner.spec, JobSpec) and owner.spec.checkpoint.uri
        if deployment.storage_claim and not has_own_store:
            is_reader = role.kind == SAMPLER
            volumes.append(_claim("storage", deployment.storage_claim, is_read_only=is_reader))
    if role.kind == DRIVER and isinstance(owner.spec, JobSpec):
        data = owner.spec.data
        if data.config_map:
            volumes.append({"name": "job-data", "configMap": {"name": data.config_map}})
        if data.claim:
            volumes.append(_claim("job-data", data.claim, is_read_only=True))
        if data.object:
            volumes.append(_scratch("job-data", deployment.volume_size))
    return volumes


def mounts_of(volumes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return where a container finds volumes."""
    return [
        {"name": volume["name"], "mountPath": POD_PATHS[volume["name"]]}
        | ({"readOnly": True} if volume["name"] in _READ_ONLY else {})
        for volume in volumes
    ]


def _scratch(name: str, size: str) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"sizeLimit": size}}


def _claim(name: str, claim: str, *, is_read_only: bool) -> dict[str, Any]:
    return {
        "name": name,
        "persistentVolumeClaim": {"claimName": claim, "readOnly": is_read_only},
    }
