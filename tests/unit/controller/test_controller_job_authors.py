"""What the author of a TrainingJob cannot reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tinsmith_controller.pods.deployment import Deployment
from tinsmith_controller.pods.image_policy import check_images
from tinsmith_controller.pods.pod_manifests import make_pod
from tinsmith_controller.pods.workload_context import WorkloadContext
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.spec import JobSpec
from tinsmith_jobs.spec_codec import decode_job
from tinsmith_jobs.spec_reader import SpecError
from tinsmith_jobs.status import Assignment

DEPLOYMENT = Deployment(
    scheduler_address="scheduler:7070",
    gateway_address="https://gateway:443",
    pod_root="root",
    database_secret="tinsmith-keys",
    storage_uri="s3://bucket",
    storage_secret="storage",
    image_repository="registry/tinsmith",
    image_tag="1",
)
OWN_SECRETS = ("tinsmith-keys", "storage", "regcred", "hub")


def job(**changes: Any) -> JobSpec:
    spec: dict[str, Any] = {
        "method": {"type": "custom"},
        "model": {"name": "m", "source": "hf://org/m"},
        "roles": {"trainer": {}, "driver": {"template": {"image": "mine:1"}}},
    }
    return decode_job("job", spec | changes)


def env_of(spec: JobSpec, role: str, deployment: Deployment = DEPLOYMENT) -> dict[str, Any]:
    owner = WorkloadContext(NamespacedName("TrainingJob", "team", "job"), "uid", "p", spec, ())
    pod = make_pod(owner, Assignment(f"job-{role}-0-e1", role, 0, "n", 1, 0), deployment)
    container = pod["spec"]["containers"][0]
    assert "envFrom" not in container or container["envFrom"] == [
        {"secretRef": {"name": "storage"}}
    ]
    return {entry["name"]: entry for entry in container["env"]}


@pytest.mark.parametrize(
    "roles",
    [
        {"sampler": {}, "trainer": {}},
        {"sampler": {}, "coordinator": {}},
        {"sampler": {}, "environment": {}},
    ],
)
def test_a_job_that_serves_has_samplers_alone(roles: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="samplers alone"):
        job(
            method={"type": "serve"},
            serve={"checkpoint": "projects/p/trainingRuns/r/checkpoints/c"},
            roles=roles,
        )


def test_the_pool_of_a_job_is_not_its_authors() -> None:
    for method in ("custom", "serve"):
        settings = {"template": {"env": [{"name": "TINSMITH_POOL", "value": "theirs.1"}]}}
        roles: dict[str, Any] = {"sampler": settings}
        if method == "custom":
            roles["driver"] = {"template": {"image": "mine:1"}}
            roles["trainer"] = {}
        spec = job(
            method={"type": method},
            roles=roles,
            **(
                {"serve": {"checkpoint": "projects/p/trainingRuns/r/checkpoints/c"}}
                if method == "serve"
                else {}
            ),
        )
        assert env_of(spec, "sampler")["TINSMITH_POOL"]["value"] != "theirs.1"
        assert "TINSMITH_POOL" in check_images(spec, ("registry/",), OWN_SECRETS)


def test_a_secret_of_the_author_becomes_variables_of_known_names_alone() -> None:
    spec = job(checkpoint={"uri": "s3://mine/x", "secretRef": {"name": "evil"}})
    env = env_of(spec, "trainer")
    from_evil = {
        name
        for name, entry in env.items()
        if entry.get("valueFrom", {}).get("secretKeyRef", {}).get("name") == "evil"
    }
    assert from_evil == {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "TINSMITH_S3_ENDPOINT",
    }


@pytest.mark.parametrize("name", [*OWN_SECRETS, "other-pod-keys", "other-driver-key-e2"])
def test_a_job_uses_no_secret_of_the_deployment(name: str) -> None:
    checkpoint = {"uri": "s3://mine/x", "secretRef": {"name": name}}
    assert name in check_images(job(checkpoint=checkpoint), ("registry/",), OWN_SECRETS)
    model = {"name": "m", "source": "hf://org/m", "hubTokenSecretRef": {"name": name}}
    assert name in check_images(job(model=model), ("registry/",), OWN_SECRETS)


@pytest.mark.parametrize("parameter", ["sts_endpoint", "credentials", "profile", "ca_file"])
def test_a_job_does_not_say_where_credentials_come_from(parameter: str) -> None:
    uri = f"s3://mine/x?{parameter}=https://evil"
    with pytest.raises(SpecError, match=parameter):
        job(checkpoint={"uri": uri, "secretRef": {"name": "own"}})
    name = f"TINSMITH_S3_{parameter.upper()}"
    roles = {
        "trainer": {"template": {"env": [{"name": name, "value": "https://evil"}]}},
        "driver": {"template": {"image": "mine:1"}},
    }
    assert name in check_images(job(roles=roles), ("registry/",), OWN_SECRETS)


@pytest.mark.parametrize(
    ("image", "is_trusted"),
    [
        ("registry/env", True),
        ("registry/env:3", True),
        (f"registry/env@sha256:{64 * '0'}", True),
        ("registry/env/chess:3", True),
        ("registry/env-evil:1", False),
        ("registry/environment:1", False),
        ("registry/folder/any:1", True),
        ("registry/folder-evil/any:1", False),
    ],
)
def test_trusted_images_are_matched_by_whole_parts(image: str, is_trusted: bool) -> None:
    roles = {
        "trainer": {},
        "environment": {"template": {"image": image}},
        "driver": {"template": {"image": "mine:1"}},
    }
    reason = check_images(job(roles=roles), ("registry/env", "registry/folder/"), OWN_SECRETS)
    assert (reason == "") is is_trusted


@pytest.mark.parametrize(
    ("address", "url"),
    [("https://gateway:443", "https://gateway:443/v1"), ("gateway:80", "http://gateway:80/v1")],
)
def test_openai_clients_are_given_a_url(address: str, url: str) -> None:
    env = env_of(job(), "driver", replace(DEPLOYMENT, gateway_address=address))
    assert env["OPENAI_BASE_URL"]["value"] == url
