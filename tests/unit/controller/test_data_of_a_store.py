"""Data of a job in its own object store: fetched before its driver, which gets no keys of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.controller.cluster_in_memory import NAMESPACE
from tests.unit.controller.manifests_as_written import deployment, manifest
from tests.unit.controller.process_in_memory import DEPLOYMENT

from tinsmith_controller.pods.image_policy import EVERYTHING
from tinsmith_controller.pods.job_refusal import refusal_of
from tinsmith_jobs.spec_codec import decode_job

URI = "s3://bucket/of-a-job?endpoint=https://s3.example.com:9000"
SPEC = (
    f"data: {{name: 's3://corpus/some/$(HOME)/train.jsonl'}}\n"
    f"checkpoint: {{uri: '{URI}', secretRef: {{name: store}}}}\n"
    "roles: {driver: {template: {initContainers: [{name: mine, image: 'registry/own:1'}]}}}"
)


def test_an_init_container_fetches_it_with_the_keys_of_the_job(tmp_path: Path) -> None:
    world, process = deployment(tmp_path)
    world.create("trainingjobs", NAMESPACE, manifest(SPEC))

    process.settle()

    pod = world.get("pods", NAMESPACE, "a-driver-0-e1")["spec"]
    fetching, mine = pod["initContainers"]
    [driver] = pod["containers"]
    assert fetching["image"].partition(":")[0].endswith("/trainer")
    assert mine["name"] == "mine"
    assert fetching["command"][-3:] == [
        "s3://corpus/some/$$(HOME)/train.jsonl?endpoint=https://s3.example.com:9000",
        "/job-data/train.jsonl",
        str(64 * 2**30),
    ]
    assert [mount["name"] for mount in fetching["volumeMounts"]] == ["job-data"]
    secrets = {
        entry["valueFrom"]["secretKeyRef"]["name"]
        for entry in fetching["env"]
        if "valueFrom" in entry
    }
    assert secrets == {"store"}
    assert not [entry for entry in (*driver["env"], *mine["env"]) if "AWS" in entry["name"]]
    mounts = {entry["name"]: entry for entry in driver["volumeMounts"]}
    assert mounts["job-data"] == {"name": "job-data", "mountPath": "/job-data", "readOnly": True}
    [method] = [entry for entry in driver["env"] if entry["name"] == "TINSMITH_JOB_METHOD"]
    assert '"data": "/job-data/train.jsonl"' in method["value"]


@pytest.mark.parametrize("trusted", [(), (EVERYTHING,)])
def test_the_secret_of_the_deployment_never_fetches_it(trusted: tuple[str, ...]) -> None:
    job = decode_job("a", manifest(SPEC)["spec"])
    operators = replace(DEPLOYMENT, trusted_images=trusted)

    assert refusal_of(operators, job, False) == ""
    assert "the Secret store of the deployment" in refusal_of(
        replace(operators, storage_secret="store"), job, False
    )
