"""The roles and agents of a job: which pods it has, and what is different about them."""

from __future__ import annotations

import re

from tinsmith_jobs.model_codec import read_model
from tinsmith_jobs.quantities import QuantityError, parse_quantity
from tinsmith_jobs.spec import (
    AGENT_PREFIX,
    COORDINATOR,
    DRIVER,
    ENVIRONMENT,
    FULL,
    SAMPLER,
    TRAINER,
    VLLM,
    WORKER,
    Adapter,
    Agent,
    Method,
    Role,
)
from tinsmith_jobs.spec_reader import Reader
from tinsmith_jobs.template_codec import read_template

_MAX_REPLICAS = 1024
_MAX_GPUS = 64
_MAX_AMOUNT = 2**50
"""Of a resource, for one pod; a PiB of memory."""
_IN_BYTES = ("memory", "ephemeral-storage")
_LEAST_BYTES = 2**20
"""No pod of ours runs in less; such an amount lacks its unit."""
_ENGINES = ("embedded", VLLM)
"""The first is the default."""
_PLAIN_ROLES = (TRAINER, SAMPLER, ENVIRONMENT, COORDINATOR, DRIVER)
_AGENT_ROLES = (TRAINER, SAMPLER, WORKER)


def read_roles(reader: Reader, method: Method) -> tuple[Role, ...]:
    """Return the roles of a job, those of agents last; a method that trains has a driver."""
    found = [
        read_role(reader.at(kind), kind, kind)
        for kind in _PLAIN_ROLES
        if reader.has(kind) and not (kind == DRIVER and method is Method.SERVE)
    ]
    if method is not Method.SERVE and not any(role.kind == DRIVER for role in found):
        found.append(Role(DRIVER, DRIVER, 1))
    for role in found:
        if role.kind == DRIVER and role.replicas != 1:
            reader.refuse("spec.roles.driver.replicas must be 1")
    for agent in reader.objects("agents"):
        found += [
            read_role(agent.at(kind), f"{AGENT_PREFIX}{agent.required('name')}/{kind}", kind)
            for kind in _AGENT_ROLES
            if agent.has(kind)
        ]
    for role in found:
        if role.kind == WORKER and not (role.template.image or role.template.command):
            reader.refuse(f"the {role.name} needs template.image or command", reader.path)
    return tuple(found)


def read_agents(reader: Reader, adapter: Adapter, *, is_local: bool) -> tuple[Agent, ...]:
    """Return the agents of a job.

    Args:
        reader: At `spec.roles`.
        adapter: Of the job, for what an agent leaves out.
        is_local: Whether one machine runs the job.
    """
    found: list[Agent] = []
    for agent in reader.objects("agents"):
        name = agent.required("name")
        if name and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,14}[a-z0-9])?", name):
            agent.refuse(f"{agent.path}.name may have 16 small letters, digits and - alone")
        if name in {each.name for each in found}:
            agent.refuse(f"spec.roles.agents has two of the name {name}")
        has_own_pods = agent.has(TRAINER) or agent.has(SAMPLER)
        model = read_model(agent.at("model"), is_local) if agent.has("model") else None
        if model is not None and not has_own_pods:
            agent.refuse(
                f"{agent.path}.model needs a trainer and sampler of the agent's own; without them "
                "it shares those of the job, which have one model"
            )
        found.append(Agent(name, model, read_adapter(agent.at("adapter"), adapter), has_own_pods))
    return tuple(found)


def read_adapter(reader: Reader, default: Adapter) -> Adapter:
    """Return what is trained; a default for what is left out."""
    return Adapter(
        type=reader.choice("type", ("lora", FULL), default.type),
        rank=reader.number("rank", default.rank, least=1, most=128),
    )


def read_role(reader: Reader, name: str, kind: str) -> Role:
    """Return one role."""
    resources = reader.at("resources")
    requests, limits = _amounts(resources, "requests"), _amounts(resources, "limits")
    for resource in sorted(requests.keys() & limits.keys()):
        if parse_quantity(requests[resource]) > parse_quantity(limits[resource]):
            resources.refuse(
                f"{resources.path}.requests.{resource} is {requests[resource]}, more than its "
                f"limit, {limits[resource]}"
            )
    default_gpus = 1 if kind in (TRAINER, SAMPLER) else 0
    return Role(
        name=name,
        kind=kind,
        replicas=reader.number("replicas", 1, least=0, most=_MAX_REPLICAS),
        gpus=reader.number("gpus", default_gpus, least=0, most=_MAX_GPUS),
        requests=requests,
        limits=limits,
        template=read_template(reader.at("template"), kind),
        engine=_engine(reader, kind),
    )


def _engine(reader: Reader, kind: str) -> str:
    if kind == SAMPLER:
        return reader.choice("engine", _ENGINES, _ENGINES[0])
    if reader.has("engine"):
        reader.refuse(f"{reader.path}.engine is a field of samplers; drop it")
    return ""


def _amounts(reader: Reader, name: str) -> dict[str, str]:
    found = {}
    for resource, amount in reader.mapping(name).items():
        if resource.endswith("/gpu"):
            reader.refuse(f"{reader.path}.{name} names GPUs; use the field gpus")
            continue
        try:
            _check_amount(resource, amount)
        except QuantityError as error:
            reader.refuse(f"{reader.path}.{name}.{resource}: {error}")
        else:
            found[resource] = str(amount)
    return found


def _check_amount(resource: str, amount: object) -> None:
    value = parse_quantity(amount)
    if not 0 <= value <= _MAX_AMOUNT:
        raise QuantityError(f"{amount} is negative, or more than any machine has")
    if resource in _IN_BYTES and 0 < value < _LEAST_BYTES:
        raise QuantityError(
            f"{amount} is less than a MiB: memory without a unit is in bytes, and m is a "
            "thousandth; write Mi or Gi"
        )
