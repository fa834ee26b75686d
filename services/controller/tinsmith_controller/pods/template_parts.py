"""What the author of a job adds to pods: volumes, mounts and init containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tinsmith_controller.pods.deployment import Deployment
from tinsmith_jobs.quantities import parse_quantity
from tinsmith_jobs.spec import InitContainer, JobSpec, Mount, Role, Volume

SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""Of every container: the restricted standard."""
_PREFIX = "own-"
"""Begins the names of an author's volumes, which are then none of Tinsmith's."""


def template_volumes(role: Role, deployment: Deployment) -> list[dict[str, Any]]:
    """Return the volumes that a role's template names, as in a pod."""
    return [
        {"name": _PREFIX + volume.name, volume.kind: _source(volume, deployment)}
        for volume in role.template.volumes
    ]


def _source(volume: Volume, deployment: Deployment) -> dict[str, Any]:
    source = dict(volume.source)
    if _is_on_disk(volume):
        # A pod beyond the size is ended by its kubelet; without one it fills the node.
        source.setdefault("sizeLimit", deployment.volume_size)
    return source


def _is_on_disk(volume: Volume) -> bool:
    return volume.kind == "emptyDir" and "medium" not in volume.source


def template_mounts(mounts: Iterable[Mount]) -> list[dict[str, Any]]:
    """Return where a container finds an author's volumes."""
    return [
        {"name": _PREFIX + mount.volume, "mountPath": mount.path}
        | ({"subPath": mount.sub_path} if mount.sub_path else {})
        | ({"readOnly": True} if mount.is_read_only else {})
        for mount in mounts
    ]


def init_containers(role: Role, resources: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what runs before a role.

    Args:
        role: The role.
        resources: Of its own container, without GPUs. With the same a pod asks for no more than was
            counted when its node was chosen.
    """
    return [_init_container(each, resources) for each in role.template.init_containers]


def _init_container(container: InitContainer, resources: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": container.name,
        "image": container.image,
        "env": [{"name": "HOME", "value": "/tmp"}, *map(dict, container.env)],
        "resources": resources,
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            *template_mounts(container.mounts),
        ],
        "securityContext": SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    parts: dict[str, Any] = {
        "imagePullPolicy": container.image_pull_policy,
        "command": list(container.command),
        "args": list(container.args),
        "envFrom": [dict(source) for source in container.env_from],
    }
    return made | {name: part for name, part in parts.items() if part}


def asked_secrets(role: Role) -> set[str]:
    """Return the names of all Secrets that a role's template names."""
    template = role.template
    references = [
        source.get(kind)
        for source in template.variable_sources
        for kind in ("secretKeyRef", "secretRef")
    ]
    return {
        *(str(entry["name"]) for entry in references if isinstance(entry, Mapping)),
        *(str(each.source["secretName"]) for each in template.volumes if each.kind == "secret"),
        *template.pull_secrets,
    }


def check_claims(job: JobSpec, deployment: Deployment) -> str:
    """Return why claims of a job may not be mounted; empty if they may.

    The deployment's claim has the checkpoints of all projects.
    """
    models = (job.model, *(agent.model for agent in job.agents))
    claims = {"spec.data.pvc": job.data.claim}
    for model in filter(None, models):
        is_claim = model.source.startswith("pvc://")
        source = model.source.removeprefix("pvc://").partition("/")[0] if is_claim else ""
        claims |= {f"source of the model {model.name}": source}
        claims |= {f"cacheClaimName of the model {model.name}": model.cache_claim}
    for role in job.roles:
        for volume in role.template.volumes:
            claim = str(volume.source.get("claimName", ""))
            claims[f"volume {volume.name} of the {role.name}"] = claim
    taken = [field for field, claim in claims.items() if claim == deployment.storage_claim]
    if not taken or not deployment.storage_claim:
        return ""
    return (
        f"{taken[0]} may not name the claim {deployment.storage_claim}, where the deployment keeps "
        "the checkpoints of all projects; take a claim of your own"
    )


def check_sizes(job: JobSpec, deployment: Deployment) -> str:
    """Return why volumes of a job are too large for a node's disk; empty if they are not.

    One without a size has all that a pod may have, so several need a size each.
    """
    bound = parse_quantity(deployment.volume_size)
    for role in job.roles:
        volumes = list(filter(_is_on_disk, role.template.volumes))
        sizes = [volume.source.get("sizeLimit", deployment.volume_size) for volume in volumes]
        if sum(map(parse_quantity, sizes)) > bound:
            names = ", ".join(volume.name for volume in volumes)
            return (
                f"the emptyDir volumes {names} of the {role.name} may have "
                f"{deployment.volume_size} of a node's disk together: give each a sizeLimit, take "
                "a persistentVolumeClaim, or ask the operators (setting volume_size)"
            )
    return ""
