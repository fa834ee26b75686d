"""Manifests as people write them, with their mistakes, and what becomes of each.

A row has the text of a manifest's fields, and a pattern. Of `schema` it is what every API server
answers; of `Failed` and `Queued` it is what the status says on a deployment with its defaults.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

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
SPECS = [
    ("as-it-should-be", "", "Running", ""),
    (
        "toleration-that-is-not-allowed",
        "scheduling: {tolerations: [{key: dedicated, operator: Exists}]}",
        "Failed",
        r"tolerations may not name dedicated: .*allowed_tolerations",
    ),
    (
        "volumes-beside-the-template",
        "roles: {driver: {volumes: []}}",
        "Failed",
        r"driver\.volumes is not a field \(it is a field of the role's template\)",
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
        r"no file of the driver's pod; give spec\.data\.configMapRef, spec\.data\.pvc, or s3:",
    ),
    (
        "data-of-the-hub-as-a-setting",
        "{data: null, method: {type: supervised, parameters: {data: 'hf://openai/gsm8k'}}}",
        "Failed",
        r"spec\.method\.parameters\.data is 'hf://openai/gsm8k', which supervised does not read",
    ),
    (
        "data-of-the-hub",
        "{data: {name: 'hf://openai/gsm8k:main'}, method: {type: rl}, roles: {sampler: {gpus: 1}}}",
        "Running",
        "",
    ),
    (
        "data-of-the-hub-with-a-key-that-is-none",
        "{data: {name: 'hf://a/b?part=c'}, method: {type: rl}, roles: {sampler: {gpus: 1}}}",
        "Failed",
        r"spec\.data\.name is refused: .*'part' is no key of an address",
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
        "toleration-with-an-operator-in-small-letters",
        "scheduling: {tolerations: [{key: spot, operator: exists}]}",
        SCHEMA,
        "'exists' is not one of",
    ),
    (
        "toleration-of-everything",
        "scheduling: {tolerations: [{operator: Exists}]}",
        "Failed",
        "without a key tolerate every taint; name the key of a taint that the operators allow",
    ),
    (
        "toleration-that-exists-with-a-value",
        "scheduling: {tolerations: [{key: spot, operator: Exists, value: 'true'}]}",
        "Failed",
        r"tolerations\[0\].value is 'true': with the operator Exists there is none; drop it",
    ),
    (
        "toleration-for-a-time-without-its-effect",
        "scheduling: {tolerations: [{key: spot, operator: Exists, tolerationSeconds: 60}]}",
        "Failed",
        r"tolerations\[0\].tolerationSeconds needs the effect NoExecute",
    ),
    (
        "node-selector-of-a-truth-value",
        "scheduling: {nodeSelector: {gpu: true}}",
        SCHEMA,
        "True is not of type 'string'",
    ),
    (
        "node-selector-as-a-list",
        "scheduling: {nodeSelector: [gpu]}",
        SCHEMA,
        r"\['gpu'\] is not of type 'object'",
    ),
    (
        "affinity-of-a-pod",
        "scheduling: {affinity: {nodeAffinity: {}}}",
        "Failed",
        r"scheduling\.affinity is not a field \(nodes are chosen by nodeSelector, .*topology",
    ),
    (
        "spread-over-a-topology",
        "scheduling: {topologySpreadConstraints: []}",
        "Failed",
        r"topologySpreadConstraints is not a field \(nodes are chosen by nodeSelector, .*topology",
    ),
    (
        "topology-that-no-node-has",
        "scheduling: {topology: {requiredLevel: rack}}",
        "Queued",
        "on one value of rack, a label that no node has, even when no other job runs",
    ),
    (
        "topology-that-would-be-nice",
        "scheduling: {topology: {preferredLevel: rack}}",
        "Running",
        "",
    ),
    (
        "model-on-a-claim",
        'model: {name: qwen3-8b, source: "pvc://models/qwen3-8b"}',
        "Running",
        "",
    ),
    (
        "resources-as-they-should-be",
        "roles: {trainer: {resources: {requests: {cpu: 500m, memory: 2Gi}, "
        "limits: {memory: 4Gi}}}}",
        "Running",
        "",
    ),
    (
        "resources-without-requests",
        "roles: {trainer: {resources: {memory: 64Gi}}}",
        "Failed",
        r"resources\.memory is not a field \(it is an amount of requests or limits\)",
    ),
    (
        "unit-in-a-small-letter",
        "roles: {trainer: {resources: {requests: {memory: 2g}}}}",
        SCHEMA,
        "'2g' does not match",
    ),
    (
        "unit-behind-a-space",
        "roles: {trainer: {resources: {requests: {memory: 2 Gi}}}}",
        SCHEMA,
        "'2 Gi' does not match",
    ),
    (
        "cpus-below-nothing",
        "roles: {trainer: {resources: {requests: {cpu: -1}}}}",
        "Failed",
        r"requests\.cpu: -1 is negative",
    ),
    (
        "more-memory-than-a-node-has",
        "roles: {trainer: {resources: {requests: {memory: 2Ti}}}}",
        "Queued",
        "no node has 2048 GiB of memory: the largest has 512",
    ),
    ("gpus-below-nothing", "roles: {trainer: {gpus: -1}}", SCHEMA, "-1 is less than the minimum"),
    (
        "more-gpus-than-a-node-has",
        "roles: {trainer: {gpus: 9}}",
        "Queued",
        "no node has 9 GPUs: the largest has 8",
    ),
    (
        "more-gpus-than-the-cluster-has",
        "roles: {trainer: {replicas: 9}}",
        "Queued",
        "the cluster has room for 8 pods with 1 GPU each when no other job runs",
    ),
    (
        "sampler-of-two-gpus",
        "roles: {sampler: {gpus: 2}}",
        "Failed",
        r"sampler\.gpus is 2: the embedded engine samples on one device.*take engine vllm",
    ),
    (
        "gpu-memory-with-a-unit",
        "scheduling: {minGPUMemoryGiB: 80Gi}",
        SCHEMA,
        "'80Gi' is not of type 'integer'",
    ),
    (
        "gpu-product-as-text",
        "scheduling: {gpuProducts: H100}",
        SCHEMA,
        "'H100' is not of type 'array'",
    ),
    ("no-model", "model: null", "Failed", r"one of spec\.model and spec\.poolRef is needed"),
    ("no-source-of-a-model", "model: {name: a}", SCHEMA, "'source' is a required property"),
    ("model-as-text", "model: Qwen/Qwen3-0.6B", SCHEMA, "is not of type 'object'"),
    ("no-method", "method: null", SCHEMA, "'method' is a required property"),
    ("method-as-text", "method: supervised", SCHEMA, "'supervised' is not of type 'object'"),
    ("method-misspelt", "method: {type: supervized}", SCHEMA, "'supervized' is not one of"),
    ("no-roles", "roles: null", "Failed", r"supervised trains, so it needs spec\.roles\.trainer"),
    (
        "role-misspelt",
        "roles: {trainers: {gpus: 1}}",
        "Failed",
        r"spec\.roles\.trainers is not a field \(did you mean trainer\?\)",
    ),
    (
        "method-that-samples-without-a-sampler",
        "method: {type: rl}\ndata: {name: arithmetic}",
        "Failed",
        r"method rl samples, so it needs spec\.roles\.sampler",
    ),
    ("steps-as-text", "method: {type: supervised, maxSteps: '10'}", SCHEMA, "type 'integer'"),
    ("deadline-with-a-unit", "activeDeadlineSeconds: 2h", SCHEMA, "'2h' is not of type 'integer'"),
    ("unknown-field", "epochs: 3", "Failed", r"spec\.epochs is not a field"),
    (
        "roles-of-a-kubeflow-job",
        "pytorchReplicaSpecs: {Master: {replicas: 1}}",
        "Failed",
        r"spec\.pytorchReplicaSpecs is not a field \(pods are described in spec\.roles\)",
    ),
    (
        "roles-of-a-jobset",
        "replicatedJobs: []",
        "Failed",
        r"spec\.replicatedJobs is not a field \(pods are described in spec\.roles\)",
    ),
    (
        "roles-of-a-ray-cluster",
        "{headGroupSpec: {}, workerGroupSpecs: []}",
        "Failed",
        r"spec\.headGroupSpec is not a field \(pods are described in .*workerGroupSpecs",
    ),
    (
        "policy-of-a-kubeflow-job",
        "runPolicy: {cleanPodPolicy: Running}",
        "Failed",
        r"runPolicy is not a field \(ttlSecondsAfterFinished, backoffLimit and suspend .*say it\)",
    ),
    (
        "pods-of-a-batch-job",
        "parallelism: 2",
        "Failed",
        r"spec\.parallelism is not a field \(replicas of a role say it\)",
    ),
    (
        "nodes-of-the-whole-job-at-the-top",
        "nodeSelector: {pool: a}",
        "Failed",
        r"spec\.nodeSelector is not a field \(it is a field of the role's template",
    ),
    (
        "priority-at-the-top",
        "priorityClassName: high",
        "Failed",
        r"spec\.priorityClassName is not a field \(it is a field of spec\.scheduling\)",
    ),
    (
        "queue-by-a-short-name",
        "scheduling: {queue: research}",
        "Failed",
        r"spec\.scheduling\.queue is not a field \(did you mean queueName\?\)",
    ),
    (
        "gpus-of-another-maker",
        "roles: {trainer: {resources: {limits: {'amd.com/gpu': 1}}}}",
        "Failed",
        r"resources\.limits names GPUs; use the field gpus",
    ),
    (
        "size-of-shared-memory",
        "roles: {trainer: {shmSize: 8Gi}}",
        "Failed",
        r"trainer\.shmSize is not a field",
    ),
    (
        "two-drivers",
        "roles: {driver: {replicas: 2}}",
        "Failed",
        r"spec\.roles\.driver\.replicas must be 1",
    ),
    ("time-to-live-with-a-unit", "ttlSecondsAfterFinished: 1h", SCHEMA, "'1h' is not of type"),
]
"""Name, fields, phase or `schema`, and a pattern of what is said."""


@functools.cache
def schema(plural: str = "trainingjobs") -> dict[str, Any]:
    crd = yaml.safe_load((ROOT / f"k8s/crd/{plural}.tinsmith.dev.yaml").read_text())
    [version] = crd["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"])


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
        elif roles.get("trainer", {}) is None:
            del spec["roles"]["trainer"]
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


def told(world: World, name: str, plural: str = "trainingjobs") -> tuple[str, str]:
    status = status_of(world, name, plural)
    failure = status.get("failure", {}).get("message", "")
    return status.get("phase", ""), failure or status.get("waitingFor", "")
