"""What a driver is told, as JSON: what to do (`TINSMITH_JOB_METHOD`), and for which agents.

Every value that has a default is written out, so that the driver needs no defaults of its own.
"""

from __future__ import annotations

import json
from typing import Any

from tinsmith_jobs.spec import Adapter, JobSpec


def describe_method(spec: JobSpec, *, model: str, data: str) -> str:
    """Return the description that `tinsmith.driver` reads.

    Args:
        spec: Of the job.
        model: Name of the base model, which may be that of a pool; empty if none is known.
        data: Path or name of what the recipe trains on; empty if the recipe brings its own.
    """
    method: dict[str, Any] = {
        "type": spec.method.value,
        "parameters": dict(spec.parameters),
        "adapter": _describe_adapter(spec.adapter),
        "checkpoint": {
            "everySteps": spec.checkpoint.every_steps,
            "keepLast": spec.checkpoint.keep_last,
            "finalName": spec.checkpoint.final_name,
        },
    }
    if spec.max_steps is not None:
        method["maxSteps"] = spec.max_steps
    if spec.checkpoint.resume_from:
        method["checkpoint"]["resumeFrom"] = spec.checkpoint.resume_from
    if model:
        method["model"] = model
    if data:
        method["data"] = data
    return json.dumps(method, sort_keys=True)


def describe_agents(spec: JobSpec, *, model: str, address: str) -> str:
    """Return the description of the agents that drivers and workers read; empty without agents.

    Args:
        spec: Of the job.
        model: Name of the base model of agents that say none.
        address: Where they are trained, sampled from and reached, each by its key.
    """
    if not spec.agents:
        return ""
    agents = [
        {
            "name": agent.name,
            "model": agent.model.name if agent.model is not None else model,
            "adapter": _describe_adapter(agent.adapter),
            "address": address,
            "roles": {
                role.kind: {"replicas": role.replicas}
                for role in spec.roles
                if role.agent == agent.name
            },
        }
        for agent in spec.agents
    ]
    return json.dumps(agents, sort_keys=True)


def _describe_adapter(adapter: Adapter) -> dict[str, Any]:
    return {"type": adapter.type, "rank": adapter.rank}
