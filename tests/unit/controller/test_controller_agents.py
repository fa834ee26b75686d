"""Pods of agents: a pool, a model and keys for each, and nothing of each other's."""

from __future__ import annotations

import base64
import json
from typing import Any

from tests.unit.controller.test_controller_manifests import (
    DEPLOYMENT,
    MODEL,
    env_of,
    owner_of,
    pods_of,
)

from tinsmith_controller.pods.pod_manifests import make_keys_secret
from tinsmith_runtime.rpc.pod_identity import PodKey

_OWN = {"trainer": {"gpus": 1}, "sampler": {"gpus": 1}}
_WORKER = {"worker": {"template": {"image": "players:1"}}}
LARGE = {"name": "large", "source": "pvc://models/large"}
MATCH: dict[str, Any] = {
    "method": {"type": "match"},
    "roles": {
        "environment": {},
        "coordinator": {},
        "agents": [
            {"name": "black", "model": LARGE, **_OWN, **_WORKER},
            {"name": "white", **_OWN, **_WORKER},
        ],
    },
}


def _envs() -> dict[str, dict[str, Any]]:
    return {pod["metadata"]["labels"]["tinsmith.dev/role"]: env_of(pod) for pod in pods_of(MATCH)}


def test_trainers_and_samplers_of_an_agent_are_a_pool_within_that_of_the_job() -> None:
    pools = {role: env.get("TINSMITH_POOL") for role, env in _envs().items()}
    whole = pools["coordinator"]
    assert pools["environment"] == whole
    for agent in ("black", "white"):
        assert pools[f"{agent}-trainer"] == pools[f"{agent}-sampler"] == f"{whole}.{agent}"


def test_an_agent_loads_its_own_model_from_its_own_volume() -> None:
    models = {role: env.get("TINSMITH_BASE_MODELS") for role, env in _envs().items()}
    assert models["black-trainer"] == models["black-sampler"] == "large=/models/large"
    assert models["white-trainer"] == models["white-sampler"] == f"{MODEL['name']}=org/qwen"
    volumes = {
        pod["metadata"]["labels"]["tinsmith.dev/role"]: {v["name"] for v in pod["spec"]["volumes"]}
        for pod in pods_of(MATCH)
    }
    assert "models" in volumes["black-trainer"]
    assert "models" not in volumes["white-trainer"]


def test_a_pod_of_an_agent_holds_the_key_of_that_agents_pool() -> None:
    content = make_keys_secret(owner_of(MATCH), DEPLOYMENT, {})["data"]
    keys = {name: PodKey.parse(base64.b64decode(text).decode()) for name, text in content.items()}
    for role, env in _envs().items():
        if "TINSMITH_POD_KEY" in env:
            entry = env["TINSMITH_POD_KEY"]["secretKeyRef"]["key"]
            assert keys[entry].identity.pool == env["TINSMITH_POOL"], role


def test_the_driver_has_the_keys_of_all_agents_and_a_worker_that_of_its_own() -> None:
    envs = _envs()
    entries = {
        name: value["secretKeyRef"]["key"]
        for name, value in envs["driver"].items()
        if name.startswith("TINSMITH_AGENT_") or name == "TINSMITH_API_KEY"
    }
    assert entries == {
        "TINSMITH_API_KEY": "driver-e1.api-key",
        "TINSMITH_AGENT_BLACK_API_KEY": "driver-e1.agent-black",
        "TINSMITH_AGENT_WHITE_API_KEY": "driver-e1.agent-white",
    }
    worker = envs["black-worker"]
    assert worker["TINSMITH_JOB_AGENT"] == "black"
    assert worker["TINSMITH_API_KEY"] == {
        "secretKeyRef": {"name": "math-pod-keys", "key": "workers.agent-black"}
    }
    assert not [name for name in worker if name.startswith("TINSMITH_AGENT_")]
    for env in (envs["driver"], worker):
        agents = json.loads(env["TINSMITH_JOB_AGENTS"])
        assert [agent["name"] for agent in agents] == ["black", "white"]
        assert agents[0]["roles"]["worker"] == {"replicas": 1}
        assert {agent["address"] for agent in agents} == {"gateway:7077"}


def test_keys_of_agents_lie_beside_the_drivers() -> None:
    keys = {"black": "b", "white": "w"}
    api_keys = {2: {"": "own", **keys}, None: keys}
    secret = make_keys_secret(owner_of(MATCH), DEPLOYMENT, api_keys)
    servers = set(make_keys_secret(owner_of(MATCH), DEPLOYMENT, {})["data"])
    assert set(secret["data"]) - servers == {
        *("driver-e2.api-key", "driver-e2.agent-black", "driver-e2.agent-white"),
        *("workers.agent-black", "workers.agent-white"),
    }


def test_an_agent_without_pods_of_its_own_trains_in_the_pool_of_the_job() -> None:
    spec = {
        "method": {"type": "match"},
        "roles": {"trainer": {}, "sampler": {}, "agents": [{"name": "a"}, {"name": "b"}]},
    }
    owner = owner_of(spec)
    assert owner.pool_of("a") == owner.pool_of("b") == owner.pool_of()
