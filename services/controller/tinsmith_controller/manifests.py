"""Pods, services and secrets of a workload, as JSON for the API server.

All pods meet the restricted standard of pod security: no root, no privileges, no writable root
file system, no token of a service account. Only pods of Tinsmith itself are given the deployment's
secrets; drivers, players and images that the author of a job chose get the job's own key alone.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith_controller.assignment.records import Key
from tinsmith_controller.deployment import METRICS_PORT, PORTS, RENDEZVOUS_PORT, Deployment
from tinsmith_controller.naming import (
    COMPONENT_LABEL,
    EPOCH_LABEL,
    GROUP,
    INDEX_LABEL,
    KIND_LABEL,
    MANAGED_LABEL,
    MANAGER,
    ROLE_LABEL,
    UID_LABEL,
    VERSION,
    WORKLOAD_LABEL,
    flat_role,
    job_resource,
    pool_id,
    secret_name,
    service_name,
    worker_id,
)
from tinsmith_controller.quantities import GPU_RESOURCE
from tinsmith_controller.spec import (
    COORDINATOR,
    DRIVER,
    ENVIRONMENT,
    SAMPLER,
    TRAINER,
    WORKER,
    Data,
    JobSpec,
    Model,
    PoolSpec,
    Role,
)
from tinsmith_controller.status import Assignment

_USER = 65532
_DATA = "/data"
_MODELS = "/models"
_CACHE = "/cache"
_JOB_DATA = "/job-data"
_HOSTNAME_LABEL = "kubernetes.io/hostname"
_SERVER_KINDS = frozenset({TRAINER, SAMPLER, ENVIRONMENT, COORDINATOR})
_MODEL_KINDS = frozenset({TRAINER, SAMPLER})
_API_KEY = "api-key"
_DRAIN_MARGIN_S = 30
_DEFAULT_GRACE_S = 60


@dataclass(frozen=True, slots=True)
class Owner:
    """The workload that things are made for.

    Attributes:
        key: Its name.
        uid: Its uid.
        project: Its project; empty for a pool.
        spec: What it asks for.
        assignments: Its pods.
        model_name: Base model that it trains; that of its pool where it uses one.
    """

    key: Key
    uid: str
    project: str
    spec: JobSpec | PoolSpec
    assignments: tuple[Assignment, ...]
    model_name: str = ""

    def role(self, name: str) -> Role:
        """Return a role that the workload has."""
        role = self.spec.role(name)
        assert role is not None, f"{self.key} has no role {name}"
        return role


def labels_of(owner: Owner) -> dict[str, str]:
    """Return the labels that everything of a workload has."""
    return {
        MANAGED_LABEL: MANAGER,
        KIND_LABEL: owner.key.kind,
        WORKLOAD_LABEL: owner.key.name,
        UID_LABEL: owner.uid,
    }


def make_pod(owner: Owner, assignment: Assignment, deployment: Deployment) -> dict[str, Any]:
    """Return the pod of an assignment."""
    role = owner.role(assignment.role)
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
        "volumes": _volumes(owner, role),
        "tolerations": [dict(entry) for entry in owner.spec.scheduling.tolerations],
    }
    if deployment.service_account:
        pod["serviceAccountName"] = deployment.service_account
    if deployment.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in deployment.pull_secrets]
    if owner.spec.scheduling.priority_class:
        pod["priorityClassName"] = owner.spec.scheduling.priority_class
    if assignment.node:
        pod["affinity"] = _pinned_to(assignment.node)
    elif owner.spec.scheduling.rules.node_selector:
        pod["nodeSelector"] = dict(owner.spec.scheduling.rules.node_selector)
    if is_group(owner.spec, role):
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
            "annotations": {**role.template.annotations, ROLE_LABEL: role.name},
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": pod,
    }


def make_services(owner: Owner) -> list[dict[str, Any]]:
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
        if is_group(owner.spec, role)
    ]


def make_key_secret(owner: Owner, epoch: int | None, api_key: str) -> dict[str, Any]:
    """Return the secret with a key of a job; see `naming.secret_name`."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(owner.key.name, epoch),
            "namespace": owner.key.namespace,
            "labels": labels_of(owner),
            "ownerReferences": [owner_reference(owner)],
        },
        "type": "Opaque",
        "data": {_API_KEY: base64.b64encode(api_key.encode()).decode()},
    }


def owner_reference(owner: Owner) -> dict[str, Any]:
    """Return the reference by which the cluster deletes things with their workload."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": owner.key.kind,
        "name": owner.key.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def is_group(spec: JobSpec | PoolSpec, role: Role) -> bool:
    """Whether the pods of a role are ranks of one process group."""
    return (
        isinstance(spec, JobSpec)
        and role.kind == TRAINER
        and spec.adapter_type == "full"
        and role.replicas > 1
    )


def model_source(model: Model) -> str:
    """Return what a trainer is told: a directory in its pod, or an id of the hub."""
    scheme, _, rest = model.source.partition("://")
    if scheme == "pvc":
        return f"{_MODELS}/{rest.partition('/')[2]}"
    return rest


def _pinned_to(node: str) -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": _HOSTNAME_LABEL, "operator": "In", "values": [node]}]}]
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        }
    }


def _grace_s(owner: Owner, role: Role) -> int:
    if role.kind == DRIVER:
        return owner.spec.scheduling.grace_s
    return _DEFAULT_GRACE_S + (_DRAIN_MARGIN_S if role.kind == TRAINER else 0)


def _container(
    owner: Owner, role: Role, assignment: Assignment, deployment: Deployment
) -> dict[str, Any]:
    template = role.template
    container: dict[str, Any] = {
        "name": role.kind,
        "image": template.image
        or f"{deployment.image_repository}/{_image(role)}:{deployment.image_tag}",
        "env": _env(owner, role, assignment, deployment),
        "resources": _resources(role, deployment),
        "volumeMounts": _mounts(owner, role),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if template.image_pull_policy:
        container["imagePullPolicy"] = template.image_pull_policy
    command = list(template.command) or _command(owner, role, assignment)
    if command:
        container["command"] = command
    if template.args:
        container["args"] = list(template.args)
    if role.kind in _SERVER_KINDS and not _is_follower(owner, role, assignment):
        port = PORTS[role.kind]
        container["ports"] = [
            {"name": "grpc", "containerPort": port},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ]
        container |= _probes(port, has_grpc=deployment.has_grpc_probes)
    if deployment.storage_secret and role.kind in _MODEL_KINDS:
        name = _storage_secret(owner, deployment)
        container["envFrom"] = [{"secretRef": {"name": name}}]
    return container


def _image(role: Role) -> str:
    return DRIVER if role.kind == WORKER else role.kind


def _is_follower(owner: Owner, role: Role, assignment: Assignment) -> bool:
    return is_group(owner.spec, role) and assignment.index > 0


def _probes(port: int, *, has_grpc: bool) -> dict[str, Any]:
    """Return probes: a port that is open means that models are loaded and calls are served."""
    check: dict[str, Any] = {"grpc": {"port": port}} if has_grpc else {"tcpSocket": {"port": port}}
    probes = {"readinessProbe": {**check, "periodSeconds": 5, "timeoutSeconds": 3}}
    if has_grpc:
        # Not before the first readiness, which may take as long as a model takes to load.
        probes["startupProbe"] = {**check, "periodSeconds": 5, "failureThreshold": 720}
        probes["livenessProbe"] = {
            **check,
            "periodSeconds": 15,
            "timeoutSeconds": 10,
            "failureThreshold": 8,
        }
    return probes


def _resources(role: Role, deployment: Deployment) -> dict[str, Any]:
    requests = {**deployment.requests.get(role.kind, {}), **role.limits, **role.requests}
    limits = {**requests, **role.limits}
    if role.gpus:
        requests[GPU_RESOURCE] = limits[GPU_RESOURCE] = str(role.gpus)
    return {"requests": requests, "limits": limits}


def _command(owner: Owner, role: Role, assignment: Assignment) -> list[str]:
    """Return how a trainer of several ranks is started; others have their image's entry point."""
    num_ranks = max(1, role.gpus)
    if role.kind != TRAINER or (num_ranks == 1 and not is_group(owner.spec, role)):
        return []
    command = ["torchrun", "--nproc-per-node", str(num_ranks), "--max-restarts", "0"]
    if is_group(owner.spec, role):
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


def _env(
    owner: Owner, role: Role, assignment: Assignment, deployment: Deployment
) -> list[dict[str, Any]]:
    """Return the variables of a container; the controller's own win over the template's."""
    own = (
        _server_env(owner, role, assignment, deployment)
        if role.kind in _SERVER_KINDS
        else _client_env(owner, role, assignment, deployment)
    )
    own = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        _value("HOME", "/tmp"),
        _value("TINSMITH_TERMINATION_LOG", "/dev/termination-log"),
        *own,
    ]
    names = {entry["name"] for entry in own}
    return [*own, *(dict(entry) for entry in role.template.env if entry["name"] not in names)]


def _server_env(
    owner: Owner, role: Role, assignment: Assignment, deployment: Deployment
) -> list[dict[str, Any]]:
    spec = owner.spec
    is_job = isinstance(spec, JobSpec)
    env = [
        _value("TINSMITH_SCHEDULER_ADDRESS", deployment.scheduler_address),
        _secret("TINSMITH_POD_KEY", deployment.pod_secret, "pod-key"),
        _value("TINSMITH_LISTEN_ADDRESS", f"$(POD_IP):{PORTS[role.kind]}"),
        _value("TINSMITH_METRICS_ADDRESS", f"$(POD_IP):{METRICS_PORT}"),
        _value(
            "TINSMITH_WORKER_NAME",
            worker_id(owner.key.name, owner.uid, role.name, assignment.index),
        ),
    ]
    is_serving = isinstance(spec, JobSpec) and spec.is_serving
    if is_job and not is_serving:
        env.append(_value("TINSMITH_POOL", pool_id(owner.key.name, owner.uid)))
    if isinstance(spec, JobSpec) and is_serving and role.kind == SAMPLER:
        env.append(_value("TINSMITH_DEDICATED_PROJECT", owner.project))
        env.append(_value("TINSMITH_DEDICATED_CHECKPOINT", spec.serve_checkpoint))
    if role.kind in _MODEL_KINDS and spec.model is not None:
        env += [
            _value("TINSMITH_BASE_MODELS", f"{spec.model.name}={model_source(spec.model)}"),
            _value("TINSMITH_STORAGE_URI", _storage_uri(spec, deployment)),
            _value("TINSMITH_DEVICE", deployment.device if role.gpus else "cpu"),
            *_hub_env(spec.model),
        ]
    if role.kind in (TRAINER, COORDINATOR):
        env.append(_value("TINSMITH_DATA_DIR", _DATA))
        if deployment.has_database:
            env.append(_secret("TINSMITH_DATABASE_URL", deployment.pod_secret, "database-url"))
    if role.kind == TRAINER and role.gpus > 1 and _trains_adapters(spec):
        env.append(_value("TINSMITH_SHARD_BASE", "true"))
    return env


def _client_env(
    owner: Owner, role: Role, assignment: Assignment, deployment: Deployment
) -> list[dict[str, Any]]:
    epoch = assignment.epoch if role.kind == DRIVER else None
    url = f"http://{deployment.gateway_address}"
    key = secret_name(owner.key.name, epoch)
    env = [
        _value("TINSMITH_ADDRESS", deployment.gateway_address),
        _secret("TINSMITH_API_KEY", key, _API_KEY),
        _value("TINSMITH_PROJECT", owner.project),
        _value("TINSMITH_JOB", job_resource(owner.project, owner.key.name)),
        _value("TINSMITH_JOB_UID", owner.uid),
        _value("OPENAI_BASE_URL", f"{url}/v1"),
        _secret("OPENAI_API_KEY", key, _API_KEY),
    ]
    if role.kind == DRIVER:
        env.append(_value("TINSMITH_JOB_METHOD", json.dumps(_method(owner), sort_keys=True)))
    return env


def _method(owner: Owner) -> dict[str, Any]:
    """Return what a driver is to do."""
    spec = owner.spec
    assert isinstance(spec, JobSpec)
    method: dict[str, Any] = {
        "type": spec.method.value,
        "parameters": dict(spec.parameters),
        "adapter": {"type": spec.adapter_type, "rank": spec.rank},
        "checkpoint": {
            "everySteps": spec.checkpoint.every_steps,
            "keepLast": spec.checkpoint.keep_last,
            "finalName": spec.checkpoint.final_name,
        },
    }
    if spec.max_steps is not None:
        method["maxSteps"] = spec.max_steps
    if owner.model_name:
        method["model"] = owner.model_name
    if spec.checkpoint.resume_from:
        method["checkpoint"]["resumeFrom"] = spec.checkpoint.resume_from
    data = _data_path(spec.data)
    if data:
        method["data"] = data
    return method


def _data_path(data: Data) -> str:
    if data.config_map:
        return f"{_JOB_DATA}/{data.config_map_key}"
    if data.claim:
        return f"{_JOB_DATA}/{data.claim_path}"
    return data.name


def _trains_adapters(spec: JobSpec | PoolSpec) -> bool:
    return not isinstance(spec, JobSpec) or spec.adapter_type == "lora"


def _storage_uri(spec: JobSpec | PoolSpec, deployment: Deployment) -> str:
    own = spec.checkpoint.uri if isinstance(spec, JobSpec) else ""
    return own or deployment.storage_uri


def _storage_secret(owner: Owner, deployment: Deployment) -> str:
    own = owner.spec.checkpoint.secret if isinstance(owner.spec, JobSpec) else ""
    return own or deployment.storage_secret


def _hub_env(model: Model) -> list[dict[str, Any]]:
    env = [_value("HF_HOME", _CACHE)] if model.source.startswith("hf://") else []
    if model.hub_token_secret:
        env.append(_secret("HF_TOKEN", model.hub_token_secret, "token"))
    return env


def _volumes(owner: Owner, role: Role) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {}}]
    if role.kind in (TRAINER, COORDINATOR):
        volumes.append({"name": "data", "emptyDir": {}})
    model = owner.spec.model
    if role.kind in _MODEL_KINDS and model is not None:
        if model.source.startswith("pvc://"):
            claim = model.source.removeprefix("pvc://").partition("/")[0]
            volumes.append(_claim("models", claim, is_read_only=True))
        if model.source.startswith("hf://"):
            cache = model.cache_claim
            volumes.append(
                _claim("cache", cache, is_read_only=False)
                if cache
                else {"name": "cache", "emptyDir": {}}
            )
        if role.gpus > 1:
            # torch's data exchange between the ranks of a pod; the default is 64 MiB.
            volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if role.kind == DRIVER and isinstance(owner.spec, JobSpec):
        data = owner.spec.data
        if data.config_map:
            volumes.append({"name": "job-data", "configMap": {"name": data.config_map}})
        if data.claim:
            volumes.append(_claim("job-data", data.claim, is_read_only=True))
    return volumes


def _mounts(owner: Owner, role: Role) -> list[dict[str, Any]]:
    paths: Mapping[str, str] = {
        "tmp": "/tmp",
        "data": _DATA,
        "models": _MODELS,
        "cache": _CACHE,
        "shm": "/dev/shm",
        "job-data": _JOB_DATA,
    }
    names: Sequence[str] = [volume["name"] for volume in _volumes(owner, role)]
    return [
        {"name": name, "mountPath": paths[name]}
        | ({"readOnly": True} if name in ("models", "job-data") else {})
        for name in names
    ]


def _claim(name: str, claim: str, *, is_read_only: bool) -> dict[str, Any]:
    return {
        "name": name,
        "persistentVolumeClaim": {"claimName": claim, "readOnly": is_read_only},
    }


def _value(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def _secret(name: str, secret: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
