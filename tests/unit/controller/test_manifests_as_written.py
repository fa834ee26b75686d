"""Manifests as people write them, with their mistakes: what refuses each, or what it waits for.

A row has the text of a manifest's fields, and a pattern. Of `schema` it is what every API server
answers; of `Failed` and `Queued` it is what the status says on a deployment with its defaults.
"""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.unit.controller.cluster_in_memory import NAMESPACE, World
from tests.unit.controller.process_in_memory import DEPLOYMENT, Process, status_of

from tinsmith_controller.pods.job_refusal import refusal_of

ROOT = Path(__file__).parents[3]
SCHEMA = "schema"
BASE = """
model: {name: qwen3-0.6b, source: "hf://Qwen/Qwen3-0.6B"}
method: {type: supervised, maxSteps: 10}
data: {name: pig_latin}
roles: {trainer: {gpus: 1}}
"""
CUSTOM = """
method: {type: custom}
data:
roles: {trainer: {gpus: 1}, driver: {template: {image: "registry.example.com/team/loop:1"}}}
"""
TABLE = [
    ("as-it-should-be", "", "Running", ""),
    (
        "token-of-a-hub-as-variable-of-a-trainer",
        "roles: {trainer: {template: {env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: "
        "{name: hub, key: token}}}]}}}",
        "Failed",
        "may not set HF_TOKEN: spec.model.hubTokenSecretRef says it",
    ),
    (
        "toleration-that-is-not-allowed",
        "scheduling: {tolerations: [{key: dedicated, operator: Exists}]}",
        "Failed",
        r"tolerations may not name dedicated: .*allowed_tolerations",
    ),
    (
        "volume-of-a-node",
        "roles: {driver: {template: {volumes: [{name: data, hostPath: {path: /}}]}}}",
        "Failed",
        r"volumes\[0\] must have one of emptyDir, .*hostPath is not a field \(volumes are an empty",
    ),
    (
        "volumes-beside-the-template",
        "roles: {driver: {volumes: []}}",
        "Failed",
        r"driver\.volumes is not a field \(it is a field of the role's template\)",
    ),
    (
        "volumes-of-a-driver",
        "roles: {driver: {template: {volumes: [{name: shm, emptyDir: {medium: Memory}}], "
        "volumeMounts: [{name: shm, mountPath: /dev/shm}]}}}",
        "Running",
        "",
    ),
    (
        "mount-of-no-volume",
        "roles: {driver: {template: {volumeMounts: [{name: data, mountPath: /mnt/data}]}}}",
        "Failed",
        r"there is no volume 'data' in volumes",
    ),
    (
        "mount-over-tinsmiths-own",
        "roles: {driver: {template: {volumes: [{name: a, emptyDir: {}}], "
        "volumeMounts: [{name: a, mountPath: /tmp/cache}]}}}",
        "Failed",
        r"mountPath is within /tmp, which is Tinsmith's own",
    ),
    (
        "volume-larger-than-a-disk",
        "roles: {driver: {template: {volumes: [{name: a, emptyDir: {sizeLimit: 4Ti}}]}}}",
        "Failed",
        r"64Gi of a node's disk together: .*setting volume_size",
    ),
    (
        "volumes-that-share-a-disk",
        "roles: {driver: {template: {volumes: "
        "[{name: a, emptyDir: {}}, {name: b, emptyDir: {}}]}}}",
        "Failed",
        r"emptyDir volumes a, b of the driver may have 64Gi .*: give each a sizeLimit",
    ),
    (
        "account-that-is-not-allowed",
        "roles: {driver: {template: {serviceAccountName: cloud}}}",
        "Failed",
        r"serviceAccountName of the driver may not name cloud: .*allowed_service_accounts",
    ),
    (
        "init-container-of-a-trainer",
        "roles: {trainer: {template: {initContainers: [{name: a, image: busybox}]}}}",
        "Failed",
        r"the trainer may not have initContainers.*for the driver and for workers",
    ),
    (
        "init-container-without-an-image",
        "roles: {driver: {template: {initContainers: [{name: a}]}}}",
        SCHEMA,
        "'image' is a required property",
    ),
    (
        "volume-of-a-config-map-that-is-missing",
        "roles: {driver: {template: {volumes: [{name: a, configMap: {name: no-such-map}}]}}}",
        "Queued",
        "ConfigMap no-such-map, which does not exist in namespace",
    ),
    (
        "variables-of-a-config-map-that-is-missing",
        "roles: {driver: {template: {envFrom: [{configMapRef: {name: no-such-map}}]}}}",
        "Queued",
        "ConfigMap no-such-map, which does not exist in namespace",
    ),
    ("gpus-as-text", 'roles: {trainer: {gpus: "1"}}', SCHEMA, "is not of type 'integer'"),
    ("gpus-in-part", "roles: {trainer: {gpus: 0.5}}", SCHEMA, "is not of type 'integer'"),
    ("replicas-in-words", "roles: {trainer: {replicas: two}}", SCHEMA, "'two' is not of type"),
    ("role-left-empty", "roles: {sampler: null}", SCHEMA, "None is not of type 'object'"),
    ("suspend-as-text", 'suspend: "false"', SCHEMA, "'false' is not of type 'boolean'"),
    (
        "misspelt-fields",
        "{roles: {trainer: {gpu: 8}}, backofLimit: 0}",
        "Failed",
        r"backofLimit .*mean backoffLimit.*trainer\.gpu .*did you mean gpus",
    ),
    ("name-that-is-a-number", "!name 20261126", SCHEMA, "20261126 is not of type 'string'"),
    ("key-given-twice", "roles: {trainer: {gpus: 8}}\nroles: {trainer: {gpus: 1}}", "Running", ""),
    (
        "huge",
        "roles: {trainer: {replicas: 1024, gpus: 64}}",
        "Queued",
        "no node has 64 GPUs: the largest has 8",
    ),
    (
        "gpus-among-limits",
        'roles: {trainer: {resources: {limits: {"nvidia.com/gpu": 1}}}}',
        "Failed",
        r"resources\.limits names GPUs; use the field gpus",
    ),
    (
        "unit-of-memory",
        "roles: {trainer: {resources: {requests: {memory: 64GB}}}}",
        SCHEMA,
        "'64GB' does not match",
    ),
    (
        "memory-without-a-unit",
        "roles: {trainer: {resources: {requests: {memory: 64}}}}",
        "Failed",
        "64 is less than a MiB",
    ),
    ("long-name", f"!name {'a' * 47}", "Failed", "47 characters, at most 40 are possible"),
    ("name-with-dots", "!name a.b.c", SCHEMA, r"'a\.b\.c' does not match"),
    (
        "config-map-that-is-missing",
        "data: {configMapRef: {name: no-such-map, key: train.jsonl}}",
        "Queued",
        "ConfigMap no-such-map, which does not exist in namespace",
    ),
    (
        "requests-over-limits",
        'roles: {trainer: {resources: {requests: {cpu: "8"}, limits: {cpu: 2}}}}',
        "Failed",
        r"requests\.cpu is 8, more than its limit, 2",
    ),
    ("method-sft", "method: {type: sft}", SCHEMA, "'sft' is not one of"),
    (
        "source-without-its-scheme",
        "model: {name: a, source: Qwen/Qwen3}",
        SCHEMA,
        "does not match",
    ),
    (
        "scheduling-all-wrong",
        "scheduling: {nodeSelector: {pool: a100}, gpuProducts: [H100], queueName: reserch, "
        "priorityClassName: high}",
        "Queued",
        "PriorityClass high.*queue reserch does not exist.*product H100.*label pool=a100",
    ),
    (
        "label-with-a-space",
        'roles: {trainer: {template: {labels: {owner: "Jane Doe"}}}}',
        SCHEMA,
        "'Jane Doe' does not match",
    ),
    (
        "variable-that-is-a-number",
        "roles: {driver: {template: {env: [{name: RUN, value: 7}]}}}",
        SCHEMA,
        "7 is not of type 'string'",
    ),
    (
        "name-of-a-variable",
        "roles: {driver: {template: {env: [{name: A-B, value: x}]}}}",
        SCHEMA,
        "'A-B' does not match",
    ),
    (
        "pool-that-is-missing",
        "{poolRef: {name: shared-quen}, model: null, roles: null}",
        "Queued",
        f"TrainerPool shared-quen, which does not exist in namespace {NAMESPACE}",
    ),
    (
        "pool-and-model",
        "poolRef: {name: shared}",
        "Failed",
        "a job that uses a pool has no trainer or sampler of its own",
    ),
    (
        "action-of-a-rule",
        "failurePolicy: {rules: [{action: failJob}]}",
        SCHEMA,
        "'failJob' is not one of",
    ),
    ("image-of-ones-own", CUSTOM, "Running", ""),
    (
        "settings-of-a-recipe",
        "method: {type: supervised, maxSteps: 10, parameters: {learningRate: 1e-4, batch-size: 8}}",
        "Failed",
        r"no setting spec\.method\.parameters\.batch-size or \S+\.learningRate; "
        r"did you mean batch_size, learning_rate\?$",
    ),
    (
        "a-value-of-a-recipe",
        "method: {type: supervised, parameters: {learning_rate: 3, log_to: wandb}}",
        "Failed",
        r"learning_rate is 3\.0; give a number above 0 and at most 1",
    ),
    (
        "data-of-another-recipe",
        "data: {name: arithmetic}",
        "Failed",
        r"spec\.data\.name is 'arithmetic', which comes with no supervised.*pig_latin, warm_start",
    ),
    (
        "data-of-a-file-on-the-laptop",
        "data: {name: train.jsonl}",
        "Failed",
        r"no file of the driver's pod; give spec\.data\.configMapRef or spec\.data\.pvc",
    ),
    (
        "data-of-the-hub-as-a-setting",
        "{data: null, method: {type: supervised, parameters: {data: 'hf://openai/gsm8k'}}}",
        "Failed",
        r"spec\.method\.parameters\.data is 'hf://openai/gsm8k'",
    ),
    (
        "checkpoints-on-the-disk-of-a-trainer",
        "checkpoint: {uri: 'file:///checkpoints', secretRef: {name: store}}",
        SCHEMA,
        "'file:///checkpoints' does not match",
    ),
    (
        "two-recipes-at-once",
        "method: {type: [supervised, rl]}",
        SCHEMA,
        r"\['supervised', 'rl'\] is not of type 'string'",
    ),
    (
        "replicas-as-text",
        "roles: {trainer: {replicas: '2'}}",
        SCHEMA,
        "'2' is not of type 'integer'",
    ),
    (
        "key-of-a-config-map-that-is-missing",
        "data: {configMapRef: {name: greetings}}",
        SCHEMA,
        "'key' is a required property",
    ),
    (
        "a-rank-that-is-none",
        "adapter: {type: lora, rank: 0}",
        SCHEMA,
        "0 is less than the minimum of 1",
    ),
    (
        "settings-of-a-driver-of-ones-own",
        "{method: {type: supervised, parameters: {mine: 1}}, "
        "roles: {driver: {template: {image: 'registry.example.com/team/loop:1'}}}}",
        "Running",
        "",
    ),
]


@functools.cache
def schema(plural: str = "trainingjobs") -> dict[str, Any]:
    crd = yaml.safe_load((ROOT / f"k8s/crd/{plural}.tinsmith.dev.yaml").read_text())
    [version] = crd["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"])


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


def manifest(text: str) -> dict[str, Any]:
    """Return a manifest: fields over those of `BASE`, and those of the trainer over its own."""
    spec = yaml.safe_load(BASE)
    name: object = "a"
    if text.startswith("!name"):
        name = yaml.safe_load(text.removeprefix("!name "))
    else:
        fields = yaml.safe_load(text) or {}
        roles = fields.pop("roles", {})
        spec |= fields
        spec["roles"] |= roles or {}
        if roles is None:
            del spec["roles"]
        elif "trainer" in roles:
            spec["roles"]["trainer"] = {"gpus": 1, **roles["trainer"]}
    spec = {key: value for key, value in spec.items() if value is not None}
    return {
        "apiVersion": "tinsmith.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": spec,
    }


def deployment(tmp_path: Path) -> tuple[World, Process]:
    """Return a cluster of one node with GPUs and one without, with two queues."""
    world = World()
    world.node("n0", 8)
    world.node("n1", 0)
    queues = tmp_path / "queues.toml"
    queues.write_text("[queues.default]\n[queues.research]\nmax_gpus = 16\n")
    check = functools.partial(refusal_of, DEPLOYMENT)
    return world, Process(world, queues=queues, check=check)


def refused_by_schema(body: dict[str, Any]) -> str:
    found = jsonschema.Draft202012Validator(schema()).iter_errors(body)
    return "; ".join(error.message for error in found)


def told(world: World, name: str, plural: str = "trainingjobs") -> tuple[str, str]:
    status = status_of(world, name, plural)
    failure = status.get("failure", {}).get("message", "")
    return status.get("phase", ""), failure or status.get("waitingFor", "")


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
    "full-parameter": ("Queued", "no node has GPUs with 80 GiB: how much they have is not known"),
    "job-on-a-pool": ("Queued", "TrainerPool shared-qwen, which does not exist"),
    "kueue": ("Failed", "queue of Kueue, which this deployment does not use"),
    "lora-sft": ("Queued", "ConfigMap greetings, which does not exist"),
    "multi-agent-match": ("Running", ""),
    "preemptible": ("Running", ""),
    "remote-agents": ("Running", ""),
    "resume-from-checkpoint": ("Queued", "ConfigMap greetings, which does not exist"),
    "rl-environment": ("Queued", "no node has the product NVIDIA-H100-80GB-HBM3"),
    "script-in-a-config-map": ("Running", ""),
    "serve-checkpoint": ("Running", ""),
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
