"""Environment variables of the containers of a workload.

Only pods of Tinsmith itself are given the deployment's secrets; drivers and players get the job's
own key, and a driver that reads the hub that of the job's model.
"""

from __future__ import annotations

from typing import Any

from tinsmith.driver.agents import agent_key_variable
from tinsmith.recipes.tasks.hub_data import is_of_hub
from tinsmith_controller.pods.deployment import METRICS_PORT, PORTS, Deployment
from tinsmith_controller.pods.pod_volumes import (
    CACHE,
    CERTIFICATES,
    DATA,
    data_path,
    model_path,
)
from tinsmith_controller.pods.workload_context import WorkloadContext
from tinsmith_jobs.method import describe_agents, describe_method
from tinsmith_jobs.naming import (
    flat_role,
    job_resource,
    key_entry,
    pod_keys_name,
    worker_id,
)
from tinsmith_jobs.spec import (
    COORDINATOR,
    DRIVER,
    ENVIRONMENT,
    FULL,
    SAMPLER,
    TRAINER,
    VLLM,
    JobSpec,
    Model,
    PoolSpec,
    Role,
)
from tinsmith_jobs.status import Assignment

SERVER_KINDS = frozenset({TRAINER, SAMPLER, ENVIRONMENT, COORDINATOR})
MODEL_KINDS = frozenset({TRAINER, SAMPLER})
TERMINATION_LOG = {"name": "TINSMITH_TERMINATION_LOG", "value": "/dev/termination-log"}
"""Says where a program of ours leaves the sentence of why it ended."""
_STORE_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "TINSMITH_S3_ENDPOINT",
)


def pod_key_entry(role: Role) -> str:
    """Return which entry of a workload's secret is the key of the pods of a role."""
    return f"{flat_role(role.name)}-key"


def variables_of(
    owner: WorkloadContext, role: Role, assignment: Assignment, deployment: Deployment
) -> list[dict[str, Any]]:
    """Return the variables of a container; the controller's own win over the template's."""
    own = (
        _server_env(owner, role, assignment, deployment)
        if role.kind in SERVER_KINDS
        else _client_env(owner, role, assignment, deployment)
    )
    own = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        _value("HOME", "/tmp"),
        TERMINATION_LOG,
        *own,
    ]
    names = {entry["name"] for entry in own}
    return [*own, *(entry for entry in _settings(role) if entry["name"] not in names)]


def _server_env(
    owner: WorkloadContext, role: Role, assignment: Assignment, deployment: Deployment
) -> list[dict[str, Any]]:
    spec = owner.spec
    env = [
        _value("TINSMITH_SCHEDULER_ADDRESS", deployment.scheduler_address),
        _secret("TINSMITH_POD_KEY", pod_keys_name(owner.key.name), pod_key_entry(role)),
        _value("TINSMITH_POOL", owner.pool_of(role.agent)),
        _on_pod_address("TINSMITH_LISTEN_ADDRESS", PORTS[role.kind]),
        _on_pod_address("TINSMITH_METRICS_ADDRESS", METRICS_PORT),
        _value(
            "TINSMITH_WORKER_NAME",
            worker_id(owner.key.name, owner.uid, role.name, assignment.index),
        ),
    ]
    if deployment.certificate_secrets:
        env += [
            _value("TINSMITH_POD_CERTIFICATE", f"{CERTIFICATES}/tls.crt"),
            _value("TINSMITH_POD_CERTIFICATE_KEY", f"{CERTIFICATES}/tls.key"),
            _value("TINSMITH_POD_AUTHORITY", f"{CERTIFICATES}/ca.crt"),
        ]
    is_serving = isinstance(spec, JobSpec) and spec.is_serving
    if isinstance(spec, JobSpec) and is_serving and role.kind == SAMPLER:
        env.append(_value("TINSMITH_DEDICATED_PROJECT", owner.project))
        env.append(_value("TINSMITH_DEDICATED_CHECKPOINT", spec.serve_checkpoint))
    if role.engine == VLLM:
        env.append(_value("TINSMITH_ENGINE", VLLM))
    model = spec.model_of(role)
    if role.kind in MODEL_KINDS and model is not None:
        env += [
            _value("TINSMITH_BASE_MODELS", f"{model.name}={model_path(model)}"),
            _value("TINSMITH_STORAGE_URI", _storage_uri(spec, deployment)),
            _value("TINSMITH_DEVICE", deployment.device if role.gpus else "cpu"),
            _value("TINSMITH_DTYPE", model.dtype),
            *_hub_env(model),
            *store_env(spec),
        ]
    if role.kind in (TRAINER, COORDINATOR):
        env.append(_value("TINSMITH_DATA_DIR", DATA))
        if deployment.database_secret:
            key = f"{role.kind}-database-url"
            env.append(_secret("TINSMITH_DATABASE_URL", deployment.database_secret, key))
    if role.kind == TRAINER and role.gpus > 1 and spec.adapter_of(role).type != FULL:
        env.append(_value("TINSMITH_SHARD_BASE", "true"))
    return env


def _client_env(
    owner: WorkloadContext, role: Role, assignment: Assignment, deployment: Deployment
) -> list[dict[str, Any]]:
    epoch = assignment.epoch if role.kind == DRIVER else None
    address = deployment.gateway_address
    url = address if "://" in address else f"http://{address}"
    secret, entry = pod_keys_name(owner.key.name), key_entry(epoch, role.agent)
    env = [
        _value("TINSMITH_ADDRESS", deployment.gateway_address),
        _secret("TINSMITH_API_KEY", secret, entry),
        _value("TINSMITH_PROJECT", owner.project),
        _value("TINSMITH_JOB", job_resource(owner.project, owner.key.name)),
        _value("TINSMITH_JOB_UID", owner.uid),
        _value("OPENAI_BASE_URL", f"{url}/v1"),
        _secret("OPENAI_API_KEY", secret, entry),
    ]
    spec = owner.spec
    assert isinstance(spec, JobSpec)
    if spec.agents:
        agents = describe_agents(spec, model=owner.model_name, address=address)
        env.append(_value("TINSMITH_JOB_AGENTS", agents))
    if role.agent:
        env.append(_value("TINSMITH_JOB_AGENT", role.agent))
    if role.kind == DRIVER:
        method = describe_method(spec, model=owner.model_name, data=data_path(spec.data))
        env.append(_value("TINSMITH_JOB_METHOD", method))
        names = {entry["name"] for entry in role.template.env}
        if spec.model is not None and _reads_hub(spec) and "HF_TOKEN" not in names:
            env += _token_env(spec.model)
        env += [
            _secret(agent_key_variable(agent.name), secret, key_entry(epoch, agent.name))
            for agent in spec.agents
        ]
    return env


def _storage_uri(spec: JobSpec | PoolSpec, deployment: Deployment) -> str:
    own = spec.checkpoint.uri if isinstance(spec, JobSpec) else ""
    return own or deployment.storage_uri


def store_env(spec: JobSpec | PoolSpec) -> list[dict[str, Any]]:
    """Return the credentials of a job's own store, one by one.

    Its author writes the Secret, so that it must not become variables under names of its choice.
    Where it has no keys, no other identity of the pod signs what goes to the author's store.
    """
    secret = spec.checkpoint.secret if isinstance(spec, JobSpec) else ""
    if not secret:
        return []
    return [
        _value("TINSMITH_S3_CREDENTIALS", "environment"),
        *(_secret(name, secret, name, optional=True) for name in _STORE_VARIABLES),
    ]


def _hub_env(model: Model) -> list[dict[str, Any]]:
    env = [_value("HF_HOME", CACHE)] if model.source.startswith("hf://") else []
    return env + _token_env(model)


def _token_env(model: Model) -> list[dict[str, Any]]:
    if not model.hub_token_secret:
        return []
    return [_secret("HF_TOKEN", model.hub_token_secret, "token")]


def _reads_hub(spec: JobSpec) -> bool:
    """Whether the driver of a job loads a data set of the hub."""
    data = data_path(spec.data) or spec.parameters.get("data")
    return isinstance(data, str) and is_of_hub(data)


def _value(name: str, value: str) -> dict[str, Any]:
    """Return a variable with just this text.

    Kubernetes would replace `$(OTHER)` by the value of another variable, a secret one too. The
    author of a job writes much of this text.
    """
    return {"name": name, "value": value.replace("$", "$$")}


def _on_pod_address(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "value": f"$(POD_IP):{port}"}


def _settings(role: Role) -> list[dict[str, Any]]:
    """Return the variables of a template; where there are secrets, as the text that they are."""
    found = []
    for entry in role.template.env:
        variable = dict(entry)
        if role.kind in SERVER_KINDS and "value" in variable:
            variable |= _value(str(variable["name"]), str(variable["value"]))
        found.append(variable)
    return found


def _secret(name: str, secret: str, key: str, *, optional: bool = False) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}
