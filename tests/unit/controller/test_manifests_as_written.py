"""Manifests as people write them, with their mistakes: what refuses each, or what it waits for."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.unit.controller.cluster_in_memory import NAMESPACE
from tests.unit.controller.manifests_as_written import (
    CUSTOM,
    ROOT,
    SCHEMA,
    SPECS,
    deployment,
    manifest,
    schema,
    told,
)
from tests.unit.controller.templates_as_written import TEMPLATES
from tests.unit.controller.work_as_written import WORK

TABLE = [*SPECS, *TEMPLATES, *WORK]


def undescribed(fields: dict[str, Any], path: str) -> list[str]:
    """Return the fields below one that `kubectl explain` says nothing of."""
    found = []
    for name, field in fields.get("properties", {}).items():
        # An API server allows no words about `metadata`, whose kind it knows itself.
        if not field.get("description") and f"{path}.{name}" != ".metadata":
            found.append(f"{path}.{name}")
        for below in (field, field.get("items"), field.get("additionalProperties")):
            if isinstance(below, dict):
                found += undescribed(below, f"{path}.{name}")
    return found


@pytest.mark.parametrize("plural", ["trainingjobs", "trainerpools"])
def test_explain_says_what_each_field_means(plural: str) -> None:
    found = schema(plural)
    assert not undescribed(found, "")
    roles = found["properties"]["spec"]["properties"]
    roles = roles["roles"]["properties"] if "roles" in roles else roles
    said = [roles[role]["description"] for role in roles]
    assert len(set(said)) == len(said), "two roles are described alike"


def refused_by_schema(body: dict[str, Any]) -> str:
    found = jsonschema.Draft202012Validator(schema()).iter_errors(body)
    return "; ".join(error.message for error in found)


@pytest.mark.parametrize(
    ("text", "phase", "pattern"), [pytest.param(*row, id=name) for name, *row in TABLE]
)
def test_a_manifest_as_it_is_written(tmp_path: Path, text: str, phase: str, pattern: str) -> None:
    body = manifest(text)
    refusal = refused_by_schema(body)
    assert bool(refusal) == (phase == SCHEMA), refusal
    if refusal:
        assert re.search(pattern, refusal), refusal
        return
    world, process = deployment(tmp_path)
    world.create("trainingjobs", NAMESPACE, body)

    process.settle()

    found, sentence = told(world, body["metadata"]["name"])
    assert found == phase, sentence
    assert re.search(pattern, sentence), sentence
    if phase != "Running":
        assert not world.assigned(), "no GPU is held for it"


KUBELET = [
    (
        "CreateContainerConfigError",
        'secret "no-such-secret" not found',
        'CreateContainerConfigError: secret "no-such-secret" not found',
    ),
    ("InvalidImageName", 'couldn\'t parse image "Loop:1 "', "InvalidImageName: couldn't parse"),
    ("ImagePullBackOff", "", "ImagePullBackOff"),
]


@pytest.mark.parametrize(("reason", "message", "expected"), KUBELET)
def test_what_a_kubelet_says_of_a_pod_is_told(
    tmp_path: Path, reason: str, message: str, expected: str
) -> None:
    world, process = deployment(tmp_path)
    world.create("trainingjobs", NAMESPACE, manifest(CUSTOM))
    world.silent_pods.add("a-driver-0-e1")
    process.settle(4)
    pod = world.get("pods", NAMESPACE, "a-driver-0-e1")
    waiting = {"reason": reason, "message": message}
    entry = {"name": "driver", "state": {"waiting": waiting}}
    pod["status"] = {"phase": "Pending", "containerStatuses": [entry]}
    world.store("pods", NAMESPACE, pod)

    process.settle(4)

    assert expected in told(world, "a")[1]


def test_a_volume_claim_that_is_missing_is_told(tmp_path: Path) -> None:
    world, process = deployment(tmp_path)
    model = 'model: {name: qwen3-8b, source: "pvc://no-such-claim/qwen3-8b"}'
    world.create("trainingjobs", NAMESPACE, manifest(model))
    world.refused_nodes.add("n0")
    process.settle(4)
    pod = world.get("pods", NAMESPACE, "a-trainer-0-e1")
    sentence = 'persistentvolumeclaim "no-such-claim" not found'
    condition = {**pod["status"]["conditions"][0], "message": sentence}
    pod["status"]["conditions"] = [condition]
    world.store("pods", NAMESPACE, pod)

    process.settle(4)

    assert sentence in told(world, "a")[1]


def test_a_trainer_on_a_cluster_without_gpus_is_told_of_gpus_0(tmp_path: Path) -> None:
    world, process = deployment(tmp_path)
    world.node("n0", 0)
    body = manifest("")
    body["spec"]["roles"]["trainer"] = {}
    world.create("trainingjobs", NAMESPACE, body)

    process.settle()

    assert "with gpus: 0 it runs on a CPU" in told(world, "a")[1]


SAMPLES = {
    "cpu-lora": ("Running", ""),
    "custom-image": ("Running", ""),
    "evaluate": ("Queued", "TrainingJob rl-math, which does not exist"),
    "full-parameter": ("Queued", "no node has GPUs with 80 GiB: how much they have is not known"),
    "job-on-a-pool": ("Queued", "TrainerPool shared-qwen, which does not exist"),
    "kueue": ("Failed", "queue of Kueue, which this deployment does not use"),
    "lora-sft": ("Queued", "ConfigMap greetings, which does not exist"),
    "multi-agent-match": ("Running", ""),
    "preemptible": ("Running", ""),
    "remote-agents": ("Running", ""),
    "resume-from-checkpoint": ("Queued", "ConfigMap greetings, which does not exist"),
    "rl-environment": ("Queued", "no node has the product NVIDIA-H100-80GB-HBM3"),
    "scenario-geometry": ("Running", ""),
    "scenario-geometry-tool": ("Running", ""),
    "scenario-gomoku": ("Running", ""),
    "scenario-gomoku-two": ("Running", ""),
    "scenario-math": ("Running", ""),
    "scenario-math-lora": ("Running", ""),
    "script-in-a-config-map": ("Running", ""),
    "serve-checkpoint": ("Queued", "TrainingJob lora-sft, which does not exist"),
    "trainer-pool": ("Ready", ""),
}
PLURALS = {
    "TrainingJob": "trainingjobs",
    "TrainerPool": "trainerpools",
    "PriorityClass": "priorityclasses",
    "ConfigMap": "configmaps",
}


def test_every_sample_has_its_row() -> None:
    assert {path.stem for path in (ROOT / "k8s/samples").glob("*.yaml")} == set(SAMPLES)


@pytest.mark.parametrize("sample", sorted(SAMPLES))
def test_a_sample_on_a_deployment_with_its_defaults(tmp_path: Path, sample: str) -> None:
    world, process = deployment(tmp_path)
    text = (ROOT / f"k8s/samples/{sample}.yaml").read_text()
    ours = {}
    for body in yaml.safe_load_all(text):
        plural = PLURALS[body["kind"]]
        ours = copy.deepcopy(body)
        world.create(plural, NAMESPACE if plural != "priorityclasses" else "", body)

    process.settle(20)

    phase, pattern = SAMPLES[sample]
    found, sentence = told(world, ours["metadata"]["name"], PLURALS[ours["kind"]])
    assert (found, bool(re.search(pattern, sentence))) == (phase, True), sentence
