"""Pods, services and secrets of a workload, as JSON for the API server.

All pods meet the restricted standard of pod security: no root, no privileges, no writable root
file system, no token of a service account. Only pods of Tinsmith itself are given the deployment's
secrets; drivers, players and images that the author of a job chose get secrets of the job alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tinsmith_controller.pods.data_fetch import data_fetch
from tinsmith_controller.pods.deployment import METRICS_PORT, PORTS, RENDEZVOUS_PORT, Deployment
from tinsmith_controller.pods.pod_env import (
    MODEL_KINDS,
    SERVER_KINDS,
    pod_key_entry,
    variables_of,
)
from tinsmith_controller.pods.pod_volumes import mounts_of, volumes_of
from tinsmith_controller.pods.template_parts import (
    SECURITY,
    init_containers,
    template_mounts,
    template_volumes,
)
from tinsmith_controller.pods.workload_context import WorkloadContext
from tinsmith_jobs.naming import (
    COMPONENT_LABEL,
    EPOCH_LABEL,
    INDEX_LABEL,
    KIND_LABEL,
    MANAGED_LABEL,
    MANAGER,
    ROLE_LABEL,
    TEMPLATE_ANNOTATION,
    UID_LABEL,
    WORKLOAD_LABEL,
    controller_reference,
    flat_role,
    key_entry,
    pod_keys_name,
    service_name,
)
from tinsmith_jobs.quantities import GPU_RESOURCE
from tinsmith_jobs.spec import (
    DRIVER,
    ENVIRONMENT,
    TRAINER,
    VLLM,
    WORKER,
    JobSpec,
    Role,
)
from tinsmith_jobs.status import Assignment
from tinsmith_runtime.rpc.pod_identity import PodIdentity, PodKey, PodRole

_USER = 65532
_DRAIN_MARGIN_S = 30
_DEFAULT_GRACE_S = 60


def labels_of(owner: WorkloadContext) -> dict[str, str]:
    """Return the labels that everything of a workload has."""
    return {
        MANAGED_LABEL: MANAGER,
        KIND_LABEL: owner.key.kind,
        WORKLOAD_LABEL: owner.key.name,
        UID_LABEL: owner.uid,
    }


def make_pod(
    owner: WorkloadContext, assignment: Assignment, deployment: Deployment
) -> dict[str, Any]:
    """Return the pod of an assignment."""
    role = owner.role(assignment.role)
    rules = owner.spec.scheduling.rules_for(role)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _grace_s(owner, role),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(owner, role, assignment, deployment)],
        "volumes": [
            *volumes_of(owner, role, deployment),
            *template_volumes(role, deployment),
        ],
        "tolerations": [toleration.in_a_pod() for toleration in rules.tolerations],
    }
    # An account may be an identity at the object store, which no program of an author's gets, and
    # no store of an author's. An environment pod runs such programs.
    has_account = role.kind in SERVER_KINDS - {ENVIRONMENT} and not _has_own_store(owner)
    account = role.template.service_account or (deployment.service_account if has_account else "")
    if account:
        pod["serviceAccountName"] = account
    pull_secrets = dict.fromkeys((*deployment.pull_secrets, *role.template.pull_secrets))
    if pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in pull_secrets]
    resources = resources_of(role, 0, deployment)
    before = [
        *data_fetch(owner.spec, role, resources, deployment),
        *init_containers(role, resources),
    ]
    if before:
        pod["initContainers"] = before
    if owner.spec.scheduling.priority_class:
        pod["priorityClassName"] = owner.spec.scheduling.priority_class
    if assignment.node:
        pod["affinity"] = _pinned_to(assignment.node)
    elif rules.node_selector:
        pod["nodeSelector"] = dict(rules.node_selector)
    if owner.spec.is_group(role):
        pod["hostname"] = assignment.pod
        pod["subdomain"] = service_name(owner.key.name, role.name)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": assignment.pod,
            "namespace": owner.key.namespace,
            "labels": {
                **role.template.labels,
                **labels_of(owner),
                COMPONENT_LABEL: role.kind,
                ROLE_LABEL: flat_role(role.name),
                INDEX_LABEL: str(assignment.index),
                EPOCH_LABEL: str(assignment.epoch),
            },
            "annotations": {
                **role.template.annotations,
                ROLE_LABEL: role.name,
                TEMPLATE_ANNOTATION: _hash(pod),
            },
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": pod,
    }


def template_of(owner: WorkloadContext, assignment: Assignment, deployment: Deployment) -> str:
    """Return the hash that the pod of an assignment would have if it was made now."""
    pod = make_pod(owner, assignment, deployment)
    found: str = pod["metadata"]["annotations"][TEMPLATE_ANNOTATION]
    return found


def _hash(pod: dict[str, Any]) -> str:
    """Return a hash of a pod's spec, wherever it runs."""
    kept = {name: value for name, value in pod.items() if name not in ("affinity", "hostname")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def make_services(owner: WorkloadContext) -> list[dict[str, Any]]:
    """Return the headless services by which the ranks of a group find each other."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": service_name(owner.key.name, role.name),
                "namespace": owner.key.namespace,
                "labels": labels_of(owner),
                "ownerReferences": [owner_reference(owner)],
            },
            "spec": {
                "clusterIP": "None",
                # Ranks meet before any of them is ready.
                "publishNotReadyAddresses": True,
                "selector": {UID_LABEL: owner.uid, ROLE_LABEL: flat_role(role.name)},
                "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
            },
        }
        for role in owner.spec.roles
        if owner.spec.is_group(role)
    ]


def make_keys_secret(
    owner: WorkloadContext,
    deployment: Deployment,
    api_keys: Mapping[int | None, Mapping[str, str]],
) -> dict[str, Any]:
    """Return the secret with the keys of a workload's pods.

    A server's is for its kind, namespace and pool. A pod is given its own entries alone. So what it
    holds opens no other role, no other agent and no other job.

    Args:
        owner: The workload.
        deployment: Has the root of the servers' keys.
        api_keys: Keys of a job's clients: by epoch of the driver, None for the agents' workers,
            and by agent; the empty name is the driver's own.
    """
    keys = {
        pod_key_entry(role): PodKey.derive(
            deployment.pod_root,
            PodIdentity(PodRole(role.kind), owner.key.namespace, owner.pool_of(role.agent)),
        )
        for role in sorted(owner.spec.roles, key=lambda role: role.name)
        if role.kind in SERVER_KINDS
    }
    content = {entry: str(key) for entry, key in keys.items()}
    for epoch, by_agent in api_keys.items():
        content |= {key_entry(epoch, agent): key for agent, key in by_agent.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": pod_keys_name(owner.key.name),
            "namespace": owner.key.namespace,
            "labels": labels_of(owner),
            "ownerReferences": [owner_reference(owner)],
        },
        "type": "Opaque",
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in content.items()},
    }


def owner_reference(owner: WorkloadContext) -> dict[str, Any]:
    """Return the reference by which the cluster deletes things with their workload."""
    return controller_reference(owner.key, owner.uid)


def _pinned_to(node: str) -> dict[str, Any]:
    # The name itself, as DaemonSets do it: the label kubernetes.io/hostname may differ from it.
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        }
    }


def _grace_s(owner: WorkloadContext, role: Role) -> int:
    if role.kind == DRIVER:
        return owner.spec.scheduling.grace_s
    return _DEFAULT_GRACE_S + (_DRAIN_MARGIN_S if role.kind == TRAINER else 0)


def _container(
    owner: WorkloadContext, role: Role, assignment: Assignment, deployment: Deployment
) -> dict[str, Any]:
    template = role.template
    container: dict[str, Any] = {
        "name": role.kind,
        "image": template.image
        or f"{deployment.image_repository}/{_image(role)}:{deployment.image_tag}",
        "env": variables_of(owner, role, assignment, deployment),
        "resources": resources_of(role, assignment.gpus, deployment),
        "volumeMounts": [
            *mounts_of(volumes_of(owner, role, deployment)),
            *template_mounts(template.mounts),
        ],
        "securityContext": SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if template.image_pull_policy:
        container["imagePullPolicy"] = template.image_pull_policy
    command = list(template.command) or _command(owner, role, assignment)
    if command:
        container["command"] = command
    if template.args:
        container["args"] = list(template.args)
    if role.kind in SERVER_KINDS and not _is_follower(owner, role, assignment):
        port = PORTS[role.kind]
        container["ports"] = [
            {"name": "grpc", "containerPort": port},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ]
        container |= _probes(port, deployment)
    env_from = [dict(source) for source in template.env_from]
    if deployment.storage_secret and not _has_own_store(owner) and role.kind in MODEL_KINDS:
        env_from.append({"secretRef": {"name": deployment.storage_secret}})
    if env_from:
        container["envFrom"] = env_from
    return container


def _has_own_store(owner: WorkloadContext) -> bool:
    return isinstance(owner.spec, JobSpec) and bool(owner.spec.checkpoint.secret)


def _image(role: Role) -> str:
    if role.engine == VLLM:
        return f"{role.kind}-{VLLM}"
    return DRIVER if role.kind == WORKER else role.kind


def _is_follower(owner: WorkloadContext, role: Role, assignment: Assignment) -> bool:
    return owner.spec.is_group(role) and assignment.index > 0


def _probes(port: int, deployment: Deployment) -> dict[str, Any]:
    """Return probes: a port that is open means that models are loaded and calls are served."""
    check: dict[str, Any] = {"tcpSocket": {"port": port}}
    if deployment.certificate_secrets:
        # Kubernetes has no certificate to show.
        check = {"httpGet": {"path": "/healthz", "port": METRICS_PORT}}
    elif deployment.has_grpc_probes:
        check = {"grpc": {"port": port}}
    probes = {"readinessProbe": {**check, "periodSeconds": 5, "timeoutSeconds": 3}}
    if "tcpSocket" not in check:
        # Not before the first readiness, which may take as long as a model takes to load.
        probes["startupProbe"] = {**check, "periodSeconds": 5, "failureThreshold": 720}
        probes["livenessProbe"] = {
            **check,
            "periodSeconds": 15,
            "timeoutSeconds": 10,
            "failureThreshold": 8,
        }
    return probes


def resources_of(role: Role, gpus: int, deployment: Deployment) -> dict[str, Any]:
    """Return requests and limits of a pod of a role.

    Args:
        role: The role.
        gpus: What was decided counts, whatever was written into the spec since.
        deployment: With the defaults.
    """
    requests = {**deployment.requests.get(role.kind, {}), **role.limits, **role.requests}
    limits = {**requests, **role.limits}
    if gpus:
        requests[GPU_RESOURCE] = limits[GPU_RESOURCE] = str(gpus)
    return {"requests": requests, "limits": limits}


def _command(owner: WorkloadContext, role: Role, assignment: Assignment) -> list[str]:
    """Return how a trainer of several ranks is started; others have their image's entry point."""
    num_ranks = max(1, assignment.gpus)
    if role.kind != TRAINER or (num_ranks == 1 and not owner.spec.is_group(role)):
        return []
    command = ["torchrun", "--nproc-per-node", str(num_ranks), "--max-restarts", "0"]
    if owner.spec.is_group(role):
        service = service_name(owner.key.name, role.name)
        first = next(
            entry.pod for entry in owner.assignments if (entry.role, entry.index) == (role.name, 0)
        )
        command += [
            *("--nnodes", str(role.replicas), "--node-rank", str(assignment.index)),
            *("--master-addr", f"{first}.{service}.{owner.key.namespace}.svc"),
            *("--master-port", str(RENDEZVOUS_PORT)),
        ]
    else:
        command.append("--standalone")
    return [*command, "-m", "tinsmith_trainer"]
