"""TrainingJobs whose authors want what is not theirs, each named by what it tries."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

OWN_SECRETS = ("tinsmith-keys", "storage", "regcred", "hub")
TRUSTED_IMAGES = ("registry/tinsmith/", "registry/env")
KUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_MINE: Json = {"template": {"image": "mine:1"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostileJob:
    """A manifest.

    Attributes:
        name: What it tries.
        spec: Its spec.
        word: In the sentence that refuses it.
        labels: Of the job itself.
    """

    name: str
    spec: Json
    word: str
    labels: dict[str, str] = field(default_factory=dict)


def good_spec() -> Json:
    """Return the spec that all of them are a change of; it is accepted itself."""
    return {
        "method": {"type": "custom"},
        "model": {"name": "tiny", "source": "hf://org/tiny"},
        "roles": {"trainer": {}, "driver": copy.deepcopy(_MINE)},
    }


def _job(name: str, word: str, **changes: Any) -> HostileJob:
    return HostileJob(name=name, spec=good_spec() | changes, word=word)


def _role(name: str, word: str, role: str, description: Json) -> HostileJob:
    roles = good_spec()["roles"] | {role: description}
    return _job(name, word, roles=roles)


def _variable(name: str, word: str, variable: Json, role: str = "trainer") -> HostileJob:
    template: Json = {"env": [variable]}
    if role == "driver":
        template["image"] = "mine:1"
    return _role(name, word, role, {"template": template})


def _serving(name: str, role: str) -> HostileJob:
    return _job(
        name,
        "samplers alone",
        method={"type": "serve"},
        serve={"checkpoint": "projects/p/trainingRuns/r/checkpoints/c"},
        roles={"sampler": {}, role: {}},
    )


def _secret(name: str, secret: str, key: str) -> Json:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _store(uri: str, secret: str = "mine") -> Json:
    return {"uri": uri, "secretRef": {"name": secret}}


def _driver(name: str, word: str, **template: Any) -> HostileJob:
    return _role(name, word, "driver", {"template": {"image": "mine:1", **template}})


def _resource(name: str, resource: str) -> HostileJob:
    resources = {"limits": {resource: "1"}}
    return _role(name, resource, "driver", {**_MINE, "resources": resources})


def _scheduling(name: str, word: str, **scheduling: Any) -> HostileJob:
    return _job(name, word, scheduling=scheduling)


HOSTILE_JOBS = (
    # The pool of others.
    _serving("a-trainer-in-the-shared-pool", "trainer"),
    _serving("a-coordinator-in-the-shared-pool", "coordinator"),
    _serving("an-environment-in-the-shared-pool", "environment"),
    _variable("the-pool-of-another-job", "POOL", {"name": "TINSMITH_POOL", "value": "theirs"}),
    _variable(
        "the-project-of-another",
        "DEDICATED_PROJECT",
        {"name": "TINSMITH_DEDICATED_PROJECT", "value": "theirs"},
    ),
    _variable(
        "a-scheduler-of-its-own",
        "SCHEDULER_ADDRESS",
        {"name": "TINSMITH_SCHEDULER_ADDRESS", "value": "evil:1"},
    ),
    # Code where the keys are.
    _variable("a-library-preloaded", "LD_PRELOAD", {"name": "LD_PRELOAD", "value": "/m/x.so"}),
    _variable("a-path-for-python", "PYTHONPATH", {"name": "PYTHONPATH", "value": "/models"}),
    _variable("a-cache-of-kernels", "TRITON", {"name": "TRITON_CACHE_DIR", "value": "/models"}),
    _role("a-command-in-the-trainer", "command", "trainer", {"template": {"command": ["sh"]}}),
    _role("arguments-in-the-trainer", "command", "trainer", {"template": {"args": ["-c"]}}),
    _role("an-image-in-the-trainer", "image", "trainer", {"template": {"image": "evil:1"}}),
    _role(
        "an-image-named-like-a-trusted-one",
        "image",
        "environment",
        {"template": {"image": "registry/env-evil:1"}},
    ),
    # Secrets and credentials.
    _variable(
        "the-root-secret", "tinsmith-keys", _secret("K", "tinsmith-keys", "pod-key"), "driver"
    ),
    _variable("the-store-of-all", "storage", _secret("K", "storage", "AWS_X"), "driver"),
    _variable("the-registrys-password", "regcred", _secret("K", "regcred", "x"), "driver"),
    _variable("the-keys-of-a-neighbour", "other", _secret("K", "other-pod-keys", "x"), "driver"),
    _variable("a-drivers-key", "other", _secret("K", "other-driver-key-e2", "x"), "driver"),
    _job(
        "the-stores-credentials-elsewhere",
        "storage",
        checkpoint=_store("s3://evil/x", "storage"),
    ),
    _job(
        "the-deployments-token-of-the-hub",
        "hub",
        model={"name": "t", "source": "hf://o/t", "hubTokenSecretRef": {"name": "hub"}},
    ),
    _job(
        "an-identity-sent-to-its-server",
        "sts_endpoint",
        checkpoint=_store("s3://evil/x?sts_endpoint=https://evil"),
    ),
    _job(
        "credentials-of-the-pod",
        "credentials",
        checkpoint=_store("s3://evil/x?credentials=web_identity"),
    ),
    _variable(
        "an-endpoint-for-the-credentials",
        "S3_ENDPOINT",
        {"name": "TINSMITH_S3_ENDPOINT", "value": "https://evil"},
    ),
    # Kubernetes.
    _driver(
        "an-identity-at-the-cloud",
        "azure.workload.identity/use",
        labels={"azure.workload.identity/use": "true"},
    ),
    _driver(
        "a-network-past-the-policies",
        "k8s.v1.cni.cncf.io/networks",
        annotations={"k8s.v1.cni.cncf.io/networks": "host"},
    ),
    _driver(
        "no-profile-for-its-system-calls",
        "container.apparmor.security.beta.kubernetes.io/driver",
        annotations={"container.apparmor.security.beta.kubernetes.io/driver": "unconfined"},
    ),
    _scheduling(
        "to-evict-the-system",
        "system-node-critical",
        priorityClassName="system-node-critical",
    ),
    _scheduling("every-node-there-is", "every taint", tolerations=[{"operator": "Exists"}]),
    _scheduling(
        "the-nodes-of-the-control-plane",
        "node-role.kubernetes.io/control-plane",
        tolerations=[{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}],
    ),
    _resource("a-device-of-the-node", "devices.kubevirt.io/kvm"),
    _resource("a-card-of-the-network", "rdma/shared"),
    HostileJob(
        name="a-queue-without-limits",
        spec=good_spec(),
        word="Kueue",
        labels={KUEUE_LABEL: "any"},
    ),
    # Places outside.
    _job("a-path-out-of-the-volume", "..", model={"name": "t", "source": "pvc://m/../../etc"}),
    _job(
        "the-clouds-metadata",
        "source",
        model={"name": "t", "source": "http://169.254.169.254/latest"},
    ),
    _job("an-argument-by-the-models-name", "model", model={"name": "a b", "source": "hf://o/t"}),
    _role("more-pods-than-a-status-holds", "replicas", "trainer", {"replicas": 10**6}),
)
