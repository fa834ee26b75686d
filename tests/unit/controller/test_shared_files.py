"""A store of shared files: which pods of jobs have its claim, and that no author gets it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.unit.controller.controller_settings import REQUIRED
from tests.unit.controller.test_controller_manifests import DEPLOYMENT, EVERYTHING, owner_of

from tinsmith_controller.config import ControllerConfig
from tinsmith_controller.pods.job_refusal import refusal_of
from tinsmith_controller.pods.pod_manifests import make_pod
from tinsmith_jobs.spec_codec import decode_job
from tinsmith_runtime.errors import ConfigError

FILES = dataclasses.replace(
    DEPLOYMENT, storage_uri="file:///storage/a", storage_secret="", storage_claim="checkpoints"
)


def claims_of(spec: dict[str, Any]) -> dict[str, bool]:
    """Return whether the claim is read-only, by the role of the pods that have it."""
    owner = owner_of(spec)
    found = {}
    for entry in owner.assignments:
        pod = make_pod(owner, entry, FILES)["spec"]
        for volume in pod["volumes"]:
            claim = volume.get("persistentVolumeClaim", {})
            if claim.get("claimName") != "checkpoints":
                continue
            mounts = pod["containers"][0]["volumeMounts"]
            assert {"name": "storage", "mountPath": "/storage"} in mounts
            variables = {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}
            assert variables["TINSMITH_STORAGE_URI"] == "file:///storage/a"
            found[entry.role] = claim["readOnly"]
    return found


def test_pods_that_write_checkpoints_have_the_claim_and_those_that_read_them_read_it() -> None:
    assert claims_of(EVERYTHING) == {
        "trainer": False,
        "sampler": True,
        "agent/red/trainer": False,
        "agent/red/sampler": True,
    }


def test_a_job_with_a_bucket_of_its_own_has_no_claim() -> None:
    own = {"uri": "s3://own/bucket", "secretRef": {"name": "own"}}
    assert claims_of({**EVERYTHING, "checkpoint": own}) == {}


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"data": {"pvc": "checkpoints/a"}}, r"spec\.data\.pvc"),
        ({"model": {"name": "m", "source": "pvc://checkpoints/a"}}, "source of the model m"),
        (
            {"model": {"name": "m", "source": "hf://a/b", "cacheClaimName": "checkpoints"}},
            "cacheClaimName of the model m",
        ),
        (
            {
                "roles": {
                    "trainer": {},
                    "driver": {
                        "template": {
                            "volumes": [
                                {"name": "v", "persistentVolumeClaim": {"claimName": "checkpoints"}}
                            ]
                        }
                    },
                }
            },
            "volume v of the driver",
        ),
    ],
)
def test_no_job_names_the_claim_of_all_projects(spec: dict[str, Any], told: str) -> None:
    base = {
        "model": {"name": "m", "source": "hf://a/b"},
        "method": {"type": "supervised"},
        "roles": {"trainer": {}},
    }
    job = decode_job("a", {**base, **spec})

    assert refusal_of(DEPLOYMENT, job, False) == ""
    refusal = refusal_of(FILES, job, False)

    assert refusal.startswith(told.replace("\\", "")), refusal
    assert "may not name the claim checkpoints" in refusal


@pytest.mark.parametrize("uri", ["s3://bucket", "file:///data", "file:///storage/../etc"])
def test_a_claim_needs_a_folder_on_it(uri: str) -> None:
    fields = REQUIRED | {"storage_claim_name": "checkpoints"}
    ControllerConfig(**fields | {"storage_uri": "file:///storage/a"})
    with pytest.raises(ConfigError, match="must be file:///storage or below"):
        ControllerConfig(**fields | {"storage_uri": uri})
