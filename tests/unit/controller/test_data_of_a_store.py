"""Data of a job in its own object store: fetched before its driver, which gets no keys of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.controller.cluster_in_memory import NAMESPACE, World
from tests.unit.controller.manifests_as_written import deployment, manifest, told
from tests.unit.controller.process_in_memory import DEPLOYMENT, Process, status_of

from tinsmith_controller.pods.job_refusal import refusal_of
from tinsmith_jobs.spec_codec import decode_job

URI = "s3://bucket/of-a-job?endpoint=https://s3.example.com:9000"
SPEC = (
    f"data: {{name: 's3://corpus/some/$(HOME)/train.jsonl'}}\n"
    f"checkpoint: {{uri: '{URI}', secretRef: {{name: store}}}}\n"
    "roles: {driver: {template: {initContainers: [{name: mine, image: 'registry/own:1'}]}}}"
)

BEGINNING = "spec.data.name cannot be fetched with the keys of spec.checkpoint: "
MISSING = f"{BEGINNING}train.jsonl does not exist in s3://corpus at https://s3.example.com:9000"
AWAY = f"{BEGINNING}the object store s3://corpus at https://s3.example.com:9000 does not answer"


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
    variables = {entry["name"]: entry.get("value") for entry in fetching["env"]}
    assert variables["TINSMITH_TERMINATION_LOG"] == "/dev/termination-log"
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


@pytest.mark.parametrize(
    ("data", "has_token"),
    [("hf://org/sums?revision=1a2b", True), ("hf:///data/sums", False), ("arithmetic", False)],
)
def test_a_driver_that_reads_the_hub_has_the_key_of_the_model(
    tmp_path: Path, data: str, has_token: bool
) -> None:
    world, process = deployment(tmp_path)
    named = "model: {name: m, source: 'hf://org/m', hubTokenSecretRef: {name: hub}}"
    mirror = "{name: HF_ENDPOINT, value: 'https://mirror'}"
    roles = f"roles: {{sampler: {{gpus: 1}}, driver: {{template: {{env: [{mirror}]}}}}}}"
    spec = f"method: {{type: rl}}\ndata: {{name: '{data}'}}\n{named}\n{roles}"
    world.create("trainingjobs", NAMESPACE, manifest(spec))

    process.settle()

    pod = world.get("pods", NAMESPACE, "a-driver-0-e1")["spec"]
    assert "initContainers" not in pod
    [driver] = pod["containers"]
    env = {entry["name"]: entry for entry in driver["env"]}
    assert env["HF_ENDPOINT"]["value"] == "https://mirror"
    assert ("HF_TOKEN" in env) == has_token
    assert f'"data": "{data}"' in env["TINSMITH_JOB_METHOD"]["value"]


def test_the_secret_of_the_deployment_never_fetches_it() -> None:
    job = decode_job("a", manifest(SPEC)["spec"])

    assert refusal_of(DEPLOYMENT, job, False) == ""
    assert refusal_of(replace(DEPLOYMENT, storage_secret="store"), job, False) == (
        "spec.checkpoint.secretRef may not name the Secret store of the deployment"
    )


def end_fetch(world: World, process: Process, name: str, code: int, reason: str) -> None:
    """Let the kubelet of a driver's pod say how the fetch before it ended."""
    pod = world.get("pods", NAMESPACE, name)
    ended = {"exitCode": code, "reason": "Error", "message": reason}
    waiting = {"reason": "PodInitializing"}
    pod["status"] = {
        "phase": "Failed",
        "initContainerStatuses": [{"name": "tinsmith-data", "state": {"terminated": ended}}],
        "containerStatuses": [{"name": "driver", "state": {"waiting": waiting}}],
    }
    world.store("pods", NAMESPACE, pod)
    process.settle(3)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("supervised", id="recipe"),
        pytest.param("custom", id="program-of-the-author"),
    ],
)
def test_a_fetch_that_no_repeat_would_help_fails_the_job_with_its_sentence(
    tmp_path: Path, method: str
) -> None:
    world, process = deployment(tmp_path)
    job = manifest(SPEC)
    job["spec"]["method"] = {"type": method}
    job["spec"]["roles"]["driver"]["template"]["command"] = ["python", "/loop.py"]
    world.create("trainingjobs", NAMESPACE, job)
    world.silent_pods.add("a-driver-0-e1")
    process.settle()

    end_fetch(world, process, "a-driver-0-e1", 2, MISSING)

    status = status_of(world, "a")
    message = f"driver 0 ended with exit code 2: {MISSING}"
    assert status["phase"] == "Failed"
    assert (status["failure"]["reason"], status["failure"]["message"]) == ("FailurePolicy", message)
    [failed] = [each for each in status["conditions"] if each["type"] == "Failed"]
    assert (failed["status"], failed["reason"]) == ("True", "FailurePolicy")
    assert failed["message"] == message
    assert not world.assigned()


def test_a_store_that_is_away_is_asked_again_and_not_for_ever(tmp_path: Path) -> None:
    world, process = deployment(tmp_path)
    world.silent_pods.update(f"a-driver-0-e{epoch}" for epoch in range(1, 5))
    world.create("trainingjobs", NAMESPACE, manifest(f"{SPEC}\nbackoffLimit: 1"))
    process.settle()

    end_fetch(world, process, "a-driver-0-e1", 3, AWAY)
    phase, sentence = told(world, "a")
    assert phase == "Starting"
    assert AWAY in sentence
    process.settle()
    end_fetch(world, process, "a-driver-0-e2", 3, AWAY)

    assert told(world, "a") == (
        "Failed",
        f"driver 0 ended with exit code 3: {AWAY} (failure 2, backoffLimit is 1)",
    )
    assert status_of(world, "a")["failure"]["reason"] == "BackoffLimitExceeded"
