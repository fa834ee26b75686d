"""Whatever is in the cluster is read, or refused with a sentence; nothing else ever comes of it."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith_controller.objects.conversion import node_record, pod_record, workload_record
from tinsmith_jobs.spec import JobSpec, PoolSpec, requested
from tinsmith_jobs.spec_codec import decode_job, decode_pool
from tinsmith_jobs.spec_reader import SpecError
from tinsmith_jobs.status_codec import decode_status, encode_status

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=40)
    | st.sampled_from(["NaN", "1e999", "-1", "²", "", "0x10", "9" * 70, "1Ei", "\x00", "../.."])
)
_JSON = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3)
    ),
    max_leaves=8,
)
_ROLE = {
    "replicas": 2,
    "gpus": 1,
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": 5}},
    "template": {
        "image": "i",
        "imagePullPolicy": "Always",
        "command": ["a"],
        "args": ["b"],
        "env": [
            {"name": "A", "value": "b"},
            {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ],
        "labels": {"a": "b"},
        "annotations": {"a": "b"},
    },
}
_JOB: dict[str, Any] = {
    "method": {"type": "rl", "maxSteps": 3, "parameters": {"a": {"b": [1]}}},
    "model": {"name": "tiny", "source": "hf://a/b", "hubTokenSecretRef": {"name": "t"}},
    "adapter": {"type": "lora", "rank": 8},
    "serve": {"checkpoint": "c"},
    "roles": {
        **dict.fromkeys(("trainer", "sampler", "environment", "coordinator"), _ROLE),
        "driver": {**_ROLE, "replicas": 1},
        "agents": [{"name": "red", "trainer": _ROLE, "worker": _ROLE}],
    },
    "data": {"configMapRef": {"name": "m", "key": "k"}},
    "scheduling": {
        "queueName": "q",
        "priorityClassName": "p",
        "preemptionGraceSeconds": 5,
        "topology": {"requiredLevel": "zone"},
        "gpuProducts": ["H200"],
        "minGPUMemoryGiB": 40,
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "k", "operator": "Equal", "value": "v", "tolerationSeconds": 3}],
    },
    "checkpoint": {"everySteps": 5, "uri": "s3://b/c", "secretRef": {"name": "s"}},
    "suspend": False,
    "ttlSecondsAfterFinished": 5,
    "failurePolicy": {"rules": [{"action": "FailJob", "exitCodes": [42], "roles": ["driver"]}]},
}
_POOL: dict[str, Any] = {"model": _JOB["model"], "trainer": _ROLE, "sampler": _ROLE}
_STATUS: dict[str, Any] = {
    "phase": "Running",
    "epoch": 3,
    "conditions": [
        {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    ],
    "assignments": [{"pod": "p", "role": "trainer", "index": 0, "node": "n", "gpus": 1}],
    "roleStatuses": [{"name": "trainer", "desired": 1, "ready": 1}],
    "preemptedBy": "TrainingJob/a/b",
    "refusals": [{"node": "n", "time": "2026-01-01T00:00:00Z"}],
    "progress": {
        "step": 5,
        "maxSteps": 10,
        "lastUpdateTime": "2026-01-01T00:00:00Z",
        "metrics": [{"name": "loss", "value": "0.5"}],
    },
    "checkpoint": {"latest": {"name": "c", "step": 5, "time": "2026-01-01T00:00:00Z"}},
    "failure": {"reason": "PodFailed", "message": "m", "exitCode": 3},
    "assignedTime": "2026-01-01T00:00:00Z",
}
_POD: dict[str, Any] = {
    "metadata": {
        "name": "p",
        "labels": {"tinsmith.dev/index": "3"},
        "annotations": {"tinsmith.dev/role": "trainer"},
        "ownerReferences": [{"kind": "TrainingJob", "name": "j", "uid": "u", "controller": True}],
    },
    "spec": {
        "nodeName": "n",
        "containers": [{"resources": {"requests": {"cpu": "1", "nvidia.com/gpu": "2"}}}],
        "initContainers": [{"resources": {"limits": {"memory": "1Gi"}}}],
        "overhead": {"cpu": "5m"},
    },
    "status": {
        "phase": "Failed",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"state": {"terminated": {"exitCode": 3, "message": "m"}}}],
    },
}
_NODE: dict[str, Any] = {
    "metadata": {"name": "n", "labels": {"nvidia.com/gpu.memory": "81559", "a": "b"}},
    "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}], "unschedulable": True},
    "status": {
        "allocatable": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "8", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        inner = (*path, key)
        found += _paths(entry, inner) if isinstance(entry, dict | list) else [inner]
    return found


@st.composite
def _mutants(draw: st.DrawFn, whole: dict[str, Any], *, leaves: bool = False) -> dict[str, Any]:
    """Return a good object with some parts replaced: by anything, or, in leaves, by their kind."""
    mutant = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_paths(mutant)))
        inner: Any = mutant
        for key in path[:-1]:
            inner = inner[key]
        old = inner[path[-1]]
        if not leaves:
            inner[path[-1]] = draw(_JSON)
        elif isinstance(old, dict | list):
            inner[path[-1]] = type(old)()
        elif isinstance(old, bool):
            inner[path[-1]] = not old
        elif isinstance(old, int):
            inner[path[-1]] = draw(st.integers(-(2**63), 2**63 - 1))
        else:
            inner[path[-1]] = draw(st.text(max_size=20) | st.sampled_from(["²", "1e999", "-1", ""]))
    return mutant


def _check_spec(spec: JobSpec | PoolSpec) -> None:
    """Check that a spec that was accepted asks for amounts that can be counted."""
    for role in spec.roles:
        asked = requested(role, {})
        assert max(asked.cpu_milli, asked.memory_bytes) <= 1000 * 2**50


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60) | st.just("job"), _JSON | _mutants(_JOB))
def test_a_job_is_read_or_refused(name: str, spec: Any) -> None:
    with contextlib.suppress(SpecError):
        _check_spec(decode_job(name, spec))


@settings(max_examples=50, deadline=None)
@given(_JSON | _mutants(_POOL))
def test_a_pool_is_read_or_refused(spec: Any) -> None:
    with contextlib.suppress(SpecError):
        _check_spec(decode_pool("pool", spec))


@settings(max_examples=100, deadline=None)
@given(_JSON | _mutants(_STATUS), st.booleans())
def test_a_status_is_always_read(status: Any, is_pool: bool) -> None:
    encode_status(decode_status(status, is_pool=is_pool))


@settings(max_examples=50, deadline=None)
@given(_mutants({"spec": _JOB, "status": _STATUS}))
def test_a_workload_is_always_read(content: Any) -> None:
    workload_record({"kind": "TrainingJob", "metadata": {"name": "j", "uid": "u"}, **content})


@settings(max_examples=100, deadline=None)
@given(_mutants(_POD, leaves=True))
def test_a_pod_of_anybody_is_always_read(pod: Any) -> None:
    pod_record(pod)


@settings(max_examples=100, deadline=None)
@given(_mutants(_NODE, leaves=True))
def test_a_node_is_always_read(node: Any) -> None:
    node_record(node)


@pytest.mark.parametrize("amount", ["1e999", "9E", 10**40])
def test_an_amount_that_no_machine_has_is_refused(amount: object) -> None:
    spec = copy.deepcopy(_JOB)
    spec["roles"]["trainer"]["resources"]["requests"]["memory"] = amount
    with pytest.raises(SpecError, match="memory"):
        decode_job("job", spec)
