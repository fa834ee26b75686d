"""The manifests, each with what is to become of it."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.cluster import Json
from tests.e2e.lab import training


class Fate(enum.Enum):
    """What becomes of a manifest."""

    REFUSED = "refused by the API server, with a message"
    FAILED = "Failed, with a sentence"
    WAITS = "waits, with a sentence"
    RUNS = "runs, and harms nobody"
    COLLECTED = "collected by the cluster, since its owner is not there"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hostile:
    """A manifest.

    Attributes:
        name: Of the case.
        fates: What may become of it; which one can depend on the version of the API server.
        spec: Its spec.
        metadata: Besides the name.
        word: In the message or sentence.
        job: Name of the job, unless that of the case.
    """

    name: str
    fates: frozenset[Fate]
    spec: Any
    metadata: Json = field(default_factory=dict)
    word: str = ""
    job: str = ""


_NO = frozenset({Fate.REFUSED, Fate.FAILED})
_FAILS = frozenset({Fate.FAILED})
_WAITS = frozenset({Fate.WAITS})
_RUNS = frozenset({Fate.RUNS})


def _with(path: str, value: object, **further: Any) -> Json:
    """Return a good spec with one field replaced: `roles.trainer.gpus`."""
    spec: Any = training(**further)
    inner = spec
    *parents, last = path.split(".")
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = value
    return dict(spec)


def _field(
    name: str, path: str, value: object, fates: frozenset[Fate] = _NO, word: str = ""
) -> Hostile:
    return Hostile(name=name, fates=fates, spec=_with(path, value), word=word)


def _deep(depth: int) -> Json:
    value: Json = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def hostile() -> Iterator[Hostile]:
    """Yield all manifests."""
    yield from _wrong_types()
    yield from _wrong_amounts()
    yield from _wrong_names()
    yield from _wrong_pods()
    yield from _contradictions()
    yield from _absences()


def _wrong_types() -> Iterator[Hostile]:
    yield Hostile(name="spec-is-a-text", fates=_NO, spec="run")
    yield Hostile(name="spec-is-a-list", fates=_NO, spec=[])
    yield Hostile(name="spec-is-empty", fates=_NO, spec={})
    yield _field("method-is-a-number", "method", 5)
    yield _field("method-is-unknown", "method.type", "orpo")
    yield _field("roles-are-a-list", "roles", [])
    yield _field("gpus-are-a-text", "roles.trainer.gpus", "all")
    yield _field("replicas-are-a-float", "roles.trainer.replicas", 1.5)
    yield _field("suspend-is-a-text", "suspend", "yes")
    yield _field("parameters-are-a-list", "method.parameters", [1])
    yield _field("command-is-a-text", "roles.driver.template.command", "rm -rf /")


def _wrong_amounts() -> Iterator[Hostile]:
    requests = "roles.trainer.resources.requests"
    yield _field("a-nan-of-memory", requests, {"memory": "NaN"}, word="NaN")
    yield _field("an-infinity-of-memory", requests, {"memory": "Infinity"})
    yield _field("more-memory-than-atoms", requests, {"memory": "1e999"}, word="1e999")
    yield _field("a-negative-cpu", requests, {"cpu": "-1"}, word="-1")
    yield _field("a-memory-of-words", requests, {"memory": "a lot"}, word="a lot")
    yield _field("gpus-by-the-back-door", requests, {"nvidia.com/gpu": "8"}, word="gpus")
    yield _field("a-resource-without-a-name", requests, {"": "1"})
    yield _field("a-resource-with-spaces", requests, {"a b": "1"})
    yield _field("less-limit-than-request", "roles.trainer.resources", _LESS_LIMIT)
    yield _field("a-million-gpus", "roles.trainer.gpus", 1_000_000)
    yield _field("a-negative-gpu", "roles.trainer.gpus", -1)
    yield _field("a-million-replicas", "roles.trainer.replicas", 1_000_000)
    yield Hostile(name="all-gpus-of-the-world", fates=_WAITS, spec=training(1024, 64), word="GPU")
    yield _field("a-grace-of-years", "scheduling.preemptionGraceSeconds", 10**9)
    yield _field("a-number-beyond-64-bits", "backoffLimit", 2**70)
    yield _field("a-rank-of-zero", "adapter.rank", 0)


_LESS_LIMIT = {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}


def _wrong_names() -> Iterator[Hostile]:
    yield Hostile(name="a-name-of-253", fates=_NO, spec=training(), job="n" * 253)
    yield Hostile(name="a-name-of-41", fates=_NO, spec=training(), job="n" * 41, word="40")
    yield Hostile(name="a-name-with-dots", fates=_NO, spec=training(), job="a.b.c")
    yield Hostile(name="a-name-in-unicode", fates=_NO, spec=training(), job="jöb")
    yield _field("a-path-in-a-claim", "model.source", "pvc://../../etc")
    yield _field("a-path-out-of-a-claim", "model.source", "pvc://models/../../etc")
    yield _field("a-path-out-of-the-data", "data", {"pvc": "claim/../../etc/passwd"})
    yield _field("a-model-with-a-comma", "model.source", "hf://a/b,c=hf://d/e")
    yield _field("a-model-by-http", "model.source", "http://169.254.169.254/latest")
    yield _field("a-model-name-in-unicode", "model.name", "mödel")
    yield _field("a-model-name-with-a-newline", "model.name", "a\nb")
    yield _field("a-queue-in-unicode", "scheduling.queueName", "队列", _RUNS | _WAITS)
    yield _field("a-store-by-http", "checkpoint.uri", "http://evil")


def _wrong_pods() -> Iterator[Hostile]:
    template = "roles.driver.template"
    stolen = [
        {"name": "TINSMITH_PROJECT", "value": "other"},
        {"name": "TINSMITH_API_KEY", "value": "stolen"},
        {"name": "TINSMITH_JOB_UID", "value": "other"},
    ]
    command = {"command": ["drive"]}
    yield _field("env-that-overrides-ours", template, {**command, "env": stolen}, word="API_KEY")
    yield _field("env-with-a-bad-name", f"{template}.env", [{"name": "A=B", "value": "c"}])
    yield _field("env-without-a-name", f"{template}.env", [{"value": "c"}])
    yield _field("labels-invalid-for-pods", f"{template}.labels", {"a": "b c"}, word="label")
    yield _field("label-names-invalid-for-pods", f"{template}.labels", {"a b": "c"})
    ours = {"tinsmith.dev/uid": "other", "tinsmith.dev/role": "trainer"}
    yield _field("labels-that-override-ours", f"{template}.labels", ours, _RUNS)
    roles = {"tinsmith.dev/role": "trainer"}
    yield _field("annotations-that-override-ours", f"{template}.annotations", roles, _RUNS)
    yield _field("annotations-invalid-for-pods", f"{template}.annotations", {"a b": "c"})
    yield _field("an-image-with-spaces", f"{template}.image", " ", _NO | _RUNS)
    yield _field("a-selector-invalid", "scheduling.nodeSelector", {"a": "b c"}, _NO | _WAITS)
    yield _field("a-toleration-without-a-key", "scheduling.tolerations", [{"value": "a"}])


def _contradictions() -> Iterator[Hostile]:
    no_trainer = training()
    del no_trainer["roles"]["trainer"]
    yield Hostile(name="nothing-that-trains", fates=_NO, spec=no_trainer, word="trainer")
    yield _field("no-driver-of-its-own", "roles.driver", {"replicas": 1}, word="driver")
    yield _field("two-drivers", "roles.driver.replicas", 2, word="driver")
    yield _field("a-pool-and-a-trainer", "poolRef", {"name": "p"}, word="pool")
    yield _field("neither-model-nor-pool", "model", None, word="model")
    twins = [{"name": "red"}, {"name": "red"}]
    yield _field("agents-of-one-name", "roles.agents", twins, word="red")
    yield _field("data-from-two-places", "data", {"name": "a", "pvc": "b/c"}, word="data")
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "0", "controller": True}
    yield Hostile(
        name="owned-by-what-is-not-there",
        fates=frozenset({Fate.RUNS, Fate.COLLECTED, Fate.REFUSED}),
        spec=training(),
        metadata={"ownerReferences": [owner]},
    )
    yield _field("parameters-without-end", "method.parameters", _deep(16), _RUNS | _NO)


def _absences() -> Iterator[Hostile]:
    yield _field("a-priority-that-is-missing", "scheduling.priorityClassName", "no", _WAITS, "no")
    yield _field("a-gpu-that-nobody-has", "scheduling.gpuProducts", ["TPU"], _WAITS)
    yield _field("a-zone-that-nobody-has", "scheduling.topology", {"requiredLevel": "z"}, _WAITS)
