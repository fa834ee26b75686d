"""The engine of a sampler: read from jobs and pools, and given to its pods."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.controller.test_controller_manifests import MODEL, container, env_of, pods_of

from tinsmith_jobs.spec import Role
from tinsmith_jobs.spec_codec import decode_job, decode_pool
from tinsmith_jobs.spec_reader import SpecError


def sampler_pod(sampler: dict[str, Any]) -> dict[str, Any]:
    roles = {"trainer": {"gpus": 1}, "sampler": sampler}
    pods = pods_of({"method": {"type": "rl"}, "roles": roles})
    [found] = [pod for pod in pods if "/sampler" in container(pod)["image"]]
    return found


def test_a_sampler_with_vllm_has_its_image_its_setting_and_shared_memory() -> None:
    pod = sampler_pod({"gpus": 1, "engine": "vllm"})
    assert container(pod)["image"] == "registry/tinsmith/sampler-vllm:1.2.3"
    assert env_of(pod)["TINSMITH_ENGINE"] == "vllm"
    mounts = {mount["mountPath"] for mount in container(pod)["volumeMounts"]}
    assert "/dev/shm" in mounts


@pytest.mark.parametrize(
    "sampler", [{"gpus": 1}, {"gpus": 1, "engine": "embedded"}], ids=["default", "named"]
)
def test_the_embedded_engine_is_in_the_image_of_all_samplers(sampler: dict[str, Any]) -> None:
    pod = sampler_pod(sampler)
    assert container(pod)["image"] == "registry/tinsmith/sampler:1.2.3"
    assert "TINSMITH_ENGINE" not in env_of(pod)


def test_pools_and_agents_choose_as_well() -> None:
    pool = decode_pool("shared", {"model": MODEL, "sampler": {"gpus": 2, "engine": "vllm"}})
    agent = {"name": "red", "trainer": {}, "sampler": {"engine": "vllm"}}
    job = decode_job(
        "j", {"model": MODEL, "method": {"type": "rl"}, "roles": {"agents": [agent], "sampler": {}}}
    )
    assert _engines(pool.roles) == {"sampler": "vllm"}
    assert _engines(job.roles)["agent/red/sampler"] == "vllm"
    assert _engines(job.roles)["agent/red/trainer"] == ""


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        pytest.param({"sampler": {"engine": "sglang"}}, "must be one of", id="unknown"),
        pytest.param({"trainer": {"engine": "vllm"}}, "a field of samplers", id="trainer"),
    ],
)
def test_another_engine_is_refused_by_name(roles: dict[str, Any], words: str) -> None:
    spec = {"model": MODEL, "method": {"type": "rl"}, "roles": {"trainer": {}, "sampler": {}}}
    with pytest.raises(SpecError, match=words):
        decode_job("j", {**spec, "roles": {**spec["roles"], **roles}})


def _engines(roles: tuple[Role, ...]) -> dict[str, str]:
    return {role.name: role.engine for role in roles}
