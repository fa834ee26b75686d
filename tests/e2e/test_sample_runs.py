"""Every sample as it is written runs to its end, or serves, on a cluster that has what it asks for.

A mirror gives out a tiny model under the names of the samples' models. Where a sample would train
for hours, the number of its steps and plays is lowered; nothing else of it is changed but the
address of its object store.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cluster import FakeNode, Json, TestCluster, path
from tests.e2e.players import LOOP, PLAYER
from tests.e2e.training import (
    TrainingDeployment,
    claimed_folder,
    create_secret,
    process_nodes,
    training_deployment,
)
from tests.fakes.hub import running_hub
from tests.fakes.s3_server import CREDENTIALS
from tests.support.scenario_samples import SAMPLES as SCENARIOS
from tinsmith_local.tiny_model import build_tiny_model

_FOLDER = Path(__file__).parents[2] / "k8s" / "samples"
_TRAINING_S = 900.0
_MODELS = ("Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-360M-Instruct")
_LABELS = {
    "nvidia.com/gpu.product": "NVIDIA-H200",
    "nvidia.com/gpu.memory": "143771",
    "topology.kubernetes.io/rack": "rack-1",
    "topology.kubernetes.io/zone": "zone-1",
}
_FEW_PLAYS: Json = {"group_size": 2, "max_tokens": 8, "num_validation": 2}
_FEW_PROBLEMS: Json = {**_FEW_PLAYS, "num_problems": 2}
_LESS: dict[str, tuple[int | None, Json]] = {
    "lora-sft": (None, {}),
    "resume-from-checkpoint": (20, {}),
    "serve-checkpoint": (None, {}),
    "full-parameter": (20, {}),
    "script-in-a-config-map": (None, {}),
    "custom-image": (None, {}),
    "rl-environment": (3, _FEW_PROBLEMS),
    "evaluate": (None, {"num_validation": 8, "num_samples": 2, "max_tokens": 8}),
    "preemptible": (3, _FEW_PROBLEMS),
    "trainer-pool": (None, {}),
    "job-on-a-pool": (3, _FEW_PROBLEMS),
    "multi-agent-match": (
        4,
        {"num_games": 4, "num_imitation_steps": 2, "num_validation": 2, "max_tokens": 8},
    ),
    "remote-agents": (3, {"num_tasks": 2, "group_size": 2, "num_validation": 2}),
}
"""In the order in which they run: some go on from what others leave. Steps, and parameters."""
_ELSEWHERE = {"cpu-lora", "kueue"} | {sample.stem for sample in SCENARIOS}
"""Those that `test_first_job`, `test_kueue` and `test_job_methods` run."""

pytestmark = pytest.mark.timeout(1200)


@dataclass
class Started:
    """A deployment with what the samples ask of their namespace."""

    cluster: TestCluster
    deployment: TrainingDeployment


@pytest.fixture(scope="module")
def started(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """What people have before they apply a sample: its data, its Secrets, its claims."""
    folder = tmp_path_factory.mktemp("samples")
    model = build_tiny_model(folder / "tiny")
    nodes = [
        FakeNode(name=f"samples-{i}", gpus=8, cpu="256", memory="2Ti", labels=_LABELS)
        for i in range(2)
    ]
    with (
        _programs() as programs,
        running_hub(dict.fromkeys(_MODELS, model)) as hub,
        process_nodes(
            cluster,
            nodes,
            environment={"HF_ENDPOINT": hub.endpoint},
            programs={
                "registry.example.com/team/loop": programs,
                "registry.example.com/team/player": programs,
            },
        ),
        cluster.namespace() as namespace,
        training_deployment(
            cluster, namespace, folder, allowed_tolerations="example.com/spot"
        ) as deployment,
    ):
        _provide(cluster, namespace, deployment)
        yield Started(cluster, deployment)


@contextlib.contextmanager
def _programs() -> Iterator[Path]:
    """Yield a folder with the package `team`, where containers see it: not below /dev or /tmp."""
    with tempfile.TemporaryDirectory(prefix="tinsmith-team-", dir="/var/tmp") as name:
        package = Path(name) / "team"
        package.mkdir()
        (package / "loop.py").write_text(LOOP.format(model="qwen3-0.6b"))
        (package / "player.py").write_text(PLAYER)
        Path(name).chmod(0o755)
        yield Path(name)


def _provide(cluster: TestCluster, namespace: str, deployment: TrainingDeployment) -> None:
    said = [
        {"role": "user", "content": "Greet me."},
        {"role": "assistant", "content": "Good day to you."},
    ]
    rows = "".join(f"{json.dumps({'messages': said})}\n" for _ in range(64))
    greetings = {"metadata": {"name": "greetings"}, "data": {"train.jsonl": rows}}
    cluster.api.create(path("v1", "configmaps", namespace), greetings)
    instructions = claimed_folder(cluster, namespace, "datasets") / "instructions"
    instructions.mkdir(parents=True)
    (instructions / "train.jsonl").write_text(rows)
    build_tiny_model(deployment.models / "qwen3-8b")
    (deployment.models / "qwen3-8b" / "model.safetensors").chmod(0o644)
    deployment.store.create_bucket("team-checkpoints")
    create_secret(cluster, namespace, "team-bucket", CREDENTIALS)
    create_secret(cluster, namespace, "hub-token", {"token": "hf_of_a_test"})
    create_secret(cluster, namespace, "judge", {"token": "of-a-judge"})


def _manifests(sample: str, deployment: TrainingDeployment) -> list[Json]:
    """Return the objects of a sample, of which the last is the job or pool."""
    found = list(yaml.safe_load_all((_FOLDER / f"{sample}.yaml").read_text()))
    spec = found[-1]["spec"]
    num_steps, parameters = _LESS[sample]
    if num_steps is not None:
        spec["method"]["maxSteps"] = num_steps
    if parameters:
        spec["method"]["parameters"] |= parameters
    uri = spec.get("checkpoint", {}).get("uri", "")
    if uri:
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        spec["checkpoint"]["uri"] = deployment.store.uri(bucket, prefix)
    return found


def test_no_sample_is_left_out() -> None:
    assert {sample.stem for sample in _FOLDER.glob("*.yaml")} == _LESS.keys() | _ELSEWHERE


@pytest.mark.parametrize("sample", _LESS)
def test_a_sample_runs_to_its_end_or_serves(started: Started, sample: str) -> None:
    cluster, jobs = started.cluster, started.deployment.jobs
    objects = _manifests(sample, started.deployment)
    text = yaml.safe_dump_all(objects)
    applied: tuple[str, ...] = ("apply", "-n", jobs.namespace, "-f", "-")
    cluster.kubectl(*applied, "--dry-run=server", stdin=text)
    cluster.kubectl(*applied, stdin=text)
    manifest = objects[-1]
    name = manifest["metadata"]["name"]

    if manifest["kind"] == "TrainerPool":
        jobs.wait_phase(name, "Ready", timeout_s=_TRAINING_S, plural="trainerpools")
        return
    method: dict[str, Any] = manifest["spec"]["method"]
    if method["type"] == "serve":
        status = jobs.wait_phase(name, "Running", timeout_s=_TRAINING_S)
        assert status["endpoint"] == started.deployment.address
        jobs.patch(name, {"cancel": True})
        jobs.wait_phase(name, "Cancelled")
        return
    status = jobs.wait_phase(name, "Succeeded", timeout_s=_TRAINING_S)
    if method["type"] == "evaluate":
        assert "gain" in {entry["name"] for entry in status["progress"]["metrics"]}
        return
    if "maxSteps" in method:
        assert status["progress"]["summary"] == f"{method['maxSteps']}/{method['maxSteps']}"
    with started.deployment.client() as client:
        final = status["checkpoint"]["final"]["name"]
        assert client.checkpoints.get(final).name == final
