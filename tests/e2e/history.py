"""Every state that nodes, pods and workloads went through, and what must hold in each of them.

A watch of each kind writes down what it sees; all objects of one API server share one counter of
changes, so that sorting by it gives back the one order in which everything happened.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.e2e.cluster import Informer, Json, TestCluster, path
from tests.e2e.deployment import ENDED, GROUP_VERSION

_PLACED = ("trainer", "sampler")
_WITHOUT_PODS = ("Pending", "Queued", "Suspended")
_FLUSH_S = 0.5
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a workload at one moment."""

    name: str
    uid: str
    namespace: str
    owner: str
    role: str
    index: int
    node: str
    gpus: int
    phase: str
    is_deleting: bool

    @property
    def is_live(self) -> bool:
        """Whether it may have processes."""
        return self.phase not in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class Workload:
    """A job or pool at one moment."""

    name: str
    uid: str
    namespace: str
    spec: Json
    status: Json
    is_current: bool
    """Whether the status is about this spec."""

    @property
    def phase(self) -> str:
        """Its phase; Pending before the controller saw it."""
        return str(self.status.get("phase", "Pending"))

    @property
    def assignments(self) -> list[Json]:
        """Its pods and their nodes."""
        return list(self.status.get("assignments", []))


@dataclass(slots=True)
class Moment:
    """What there is between two changes.

    Attributes:
        time_s: When it began, in monotonic seconds.
        ready: Whether a node is ready, by name.
        capacity: GPUs of each node.
        pods: Pods by uid of their workload and their own.
        workloads: Jobs and pools by uid.
        given: GPUs of each node that are assigned.
        used: GPUs of each node that pods have which did not end.
        stranded: Uids of pods whose node was lost under them; a successor may be there with them.
    """

    time_s: float = 0.0
    ready: dict[str, bool] = field(default_factory=dict)
    capacity: dict[str, int] = field(default_factory=dict)
    pods: dict[str, dict[str, Pod]] = field(default_factory=lambda: defaultdict(dict))
    workloads: dict[str, Workload] = field(default_factory=dict)
    given: Counter[str] = field(default_factory=Counter)
    used: Counter[str] = field(default_factory=Counter)
    stranded: set[str] = field(default_factory=set)

    def set_node(self, name: str, is_ready: bool, gpus: int) -> None:
        """Take note of a node."""
        self.ready[name], self.capacity[name] = is_ready, gpus
        if not is_ready:
            for pods in self.pods.values():
                self.stranded.update(pod.uid for pod in pods.values() if pod.node == name)

    def set_pod(self, owner: str, uid: str, pod: Pod | None) -> None:
        """Take note of a pod, or that it is gone."""
        before = self.pods[owner].pop(uid, None)
        if before is not None and before.is_live:
            self.used[before.node] -= before.gpus
        if pod is None:
            return
        self.pods[owner][uid] = pod
        if pod.is_live:
            self.used[pod.node] += pod.gpus
        if pod.node and not self.ready.get(pod.node, False):
            self.stranded.add(uid)

    def set_workload(self, uid: str, workload: Workload | None) -> None:
        """Take note of a workload, or that it is gone."""
        before = self.workloads.pop(uid, None)
        for state, sign in ((before, -1), (workload, 1)):
            for entry in state.assignments if state is not None else ():
                self.given[entry.get("node", "")] += sign * entry.get("gpus", 0)
        if workload is not None:
            self.workloads[uid] = workload

    def live_pods(self, owner: str) -> list[Pod]:
        """Return the pods of a workload that may have processes, on nodes that answer."""
        return [
            pod
            for pod in self.pods.get(owner, {}).values()
            if pod.is_live and pod.uid not in self.stranded
        ]


@dataclass(frozen=True, slots=True)
class _Change:
    revision: int
    time_s: float
    kind: str
    uid: str
    owner: str
    state: Any


recent: deque[History] = deque(maxlen=8)
"""Histories of the test that runs; `conftest` empties it before each."""


class History:
    """Writes down, within its context, what happens in some namespaces.

    Args:
        cluster: Where.
        namespaces: Of the pods and workloads.
    """

    def __init__(self, cluster: TestCluster, namespaces: Sequence[str]) -> None:
        recent.append(self)
        self._namespaces = frozenset(namespaces)
        self._changes: list[_Change] = []
        self._informers = [
            Informer(cluster.api, path("v1", "nodes"), self._listener("node")),
            Informer(
                cluster.api,
                path("v1", "pods"),
                self._listener("pod"),
                {"labelSelector": "tinsmith.dev/workload"},
            ),
            *(
                Informer(cluster.api, path(GROUP_VERSION, plural), self._listener("workload"))
                for plural in ("trainingjobs", "trainerpools")
            ),
        ]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            for informer in self._informers:
                informer.start()
                undo.callback(informer.stop)
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        time.sleep(_FLUSH_S)  # for the last changes to arrive
        for informer in self._informers:
            informer.stop()

    def moments(self) -> Iterator[tuple[Moment, str]]:
        """Yield the state after each change, with the uid of the workload that it is about."""
        moment = Moment()
        for change in self._ordered():
            moment.time_s = change.time_s
            if change.kind == "node":
                moment.set_node(*change.state)
            elif change.kind == "pod":
                moment.set_pod(change.owner, change.uid, change.state)
            else:
                moment.set_workload(change.uid, change.state)
            yield moment, change.owner

    def violations(self) -> list[str]:
        """Return everything that must never be and was, as sentences."""
        found: dict[str, None] = {}
        for moment, owner in self.moments():
            for sentence in (
                *_duplicates(moment, owner),
                *_torn_gangs(moment, owner),
                *_overfull_nodes(moment),
            ):
                found[sentence] = None
        return list(found)

    def last_status(self, name: str) -> Json:
        """Return the last status that a workload of a name had, though it is gone."""
        states = [change.state for change in self._ordered()]
        return next(
            (s.status for s in reversed(states) if isinstance(s, Workload) and s.name == name), {}
        )

    def phases(self, name: str) -> list[str]:
        """Return the phases that a workload of a name went through."""
        found: list[str] = []
        for change in self._ordered():
            state = change.state
            if isinstance(state, Workload) and state.name == name and found[-1:] != [state.phase]:
                found.append(state.phase)
        return found

    def pods(self, name: str) -> list[Pod]:
        """Return the states of the pods whose name begins so, in order."""
        states = [change.state for change in self._ordered() if isinstance(change.state, Pod)]
        return [state for state in states if state.name.startswith(name)]

    def lines(self) -> Iterator[str]:
        """Yield each change as a line of JSON, in order."""
        for change in self._ordered():
            yield json.dumps(asdict(change)) + "\n"

    def _ordered(self) -> list[_Change]:
        return sorted(self._changes, key=lambda change: change.revision)

    def note(self, kind: str, event: str, item: Json) -> None:
        """Take note of a change of a node, pod or workload, as a watch tells it."""
        metadata = item["metadata"]
        if kind != "node" and metadata["namespace"] not in self._namespaces:
            return
        is_gone = event == "DELETED"
        owner: str = metadata["uid"]
        state: Any = None
        if kind == "node":
            state = _node(item, is_gone)
        elif kind == "pod":
            pod = _pod(item)
            owner, state = pod.owner, None if is_gone else pod
        elif not is_gone:
            state = _workload(item)
        self._changes.append(
            _Change(
                int(metadata["resourceVersion"]),
                time.monotonic(),
                kind,
                metadata["uid"],
                owner,
                state,
            )
        )

    def _listener(self, kind: str) -> Callable[[str, Json], None]:
        return functools.partial(self.note, kind)


def leftovers(cluster: TestCluster, namespace: str, name: str = "") -> list[str]:
    """Return what is there and belongs to no assignment of a living workload.

    Pods that ended by themselves stay with a job that has ended, for their logs.

    Args:
        cluster: Where.
        namespace: Where.
        name: Of the workload; empty looks at the things of all.
    """
    workloads = [
        item
        for plural in ("trainingjobs", "trainerpools")
        for item in cluster.api.list(path(GROUP_VERSION, plural, namespace))
    ]
    wanted: dict[str, set[str]] = {"pods": set(), "secrets": set(), "services": set()}
    ended: set[str] = set()
    for item in workloads:
        owner, status = item["metadata"]["name"], item.get("status", {})
        if status.get("phase") in ENDED:
            ended.add(item["metadata"]["uid"])
        for entry in status.get("assignments", []):
            wanted["pods"].add(entry["pod"])
            wanted["services"].add(f"job-{owner}-{entry['role']}")
            wanted["secrets"].add(f"{owner}-pod-keys")
    return [
        f"{plural} {item['metadata']['name']}"
        for plural, names in wanted.items()
        for item in cluster.api.list(
            path("v1", plural, namespace),
            labelSelector=f"tinsmith.dev/workload={name}" if name else "tinsmith.dev/workload",
        )
        if item["metadata"]["name"] not in names and not _is_kept(item, ended)
    ]


def _is_kept(item: Json, ended: set[str]) -> bool:
    """Whether an object is a pod that ended by itself, of a job that has ended."""
    metadata = item["metadata"]
    owners = {reference["uid"] for reference in metadata.get("ownerReferences", [])}
    has_ended = item.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return has_ended and "deletionTimestamp" not in metadata and bool(owners & ended)


def _node(item: Json, is_gone: bool) -> tuple[str, bool, int]:
    status = item.get("status", {})
    is_ready = not is_gone and any(
        entry["type"] == "Ready" and entry["status"] == "True"
        for entry in status.get("conditions", [])
    )
    return item["metadata"]["name"], is_ready, int(status.get("allocatable", {}).get(_GPU, 0))


def _pod(item: Json) -> Pod:
    metadata, spec = item["metadata"], item["spec"]
    limits = [entry.get("resources", {}).get("limits", {}) for entry in spec["containers"]]
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        owner=next((entry["uid"] for entry in metadata.get("ownerReferences", [])), ""),
        role=metadata.get("annotations", {}).get("tinsmith.dev/role", ""),
        index=int(metadata["labels"].get("tinsmith.dev/index", 0)),
        node=spec.get("nodeName", ""),
        gpus=sum(int(entry.get(_GPU, 0)) for entry in limits),
        phase=item.get("status", {}).get("phase", "Pending"),
        is_deleting="deletionTimestamp" in metadata,
    )


def _workload(item: Json) -> Workload:
    metadata, status = item["metadata"], item.get("status", {})
    return Workload(
        name=metadata["name"],
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        spec=item["spec"],
        status=status,
        is_current=status.get("observedGeneration") == metadata["generation"],
    )


def _duplicates(moment: Moment, owner: str) -> Iterator[str]:
    """Find two live pods for one place in a workload."""
    names: dict[tuple[str, int], list[str]] = defaultdict(list)
    for pod in moment.live_pods(owner):
        names[pod.role, pod.index].append(pod.name)
    for (role, index), found in names.items():
        if len(found) > 1:
            yield f"{role} {index} is there {len(found)} times: {', '.join(sorted(found))}"


def _torn_gangs(moment: Moment, owner: str) -> Iterator[str]:
    """Find a job that runs with a part of its pods, or waits with some."""
    job = moment.workloads.get(owner)
    if job is None or "method" not in job.spec:
        return
    if job.phase in _WITHOUT_PODS:
        live = [pod.name for pod in moment.live_pods(owner)]
        if live or job.assignments:
            yield f"{job.name} is {job.phase} and has {live}, {job.assignments}"
    if job.phase == "Running" and job.is_current:
        roles = job.spec.get("roles", {})
        wanted = {
            (kind, index)
            for kind in _PLACED
            if kind in roles
            for index in range(roles[kind].get("replicas", 1))
        }
        has = {(e["role"], e["index"]) for e in job.assignments if e.get("node")}
        if wanted - has:
            yield f"{job.name} is Running without {sorted(wanted - has)}"


def _overfull_nodes(moment: Moment) -> Iterator[str]:
    """Find nodes with more GPUs given away, or in use, than they have."""
    for name, gpus in moment.capacity.items():
        if moment.given[name] > gpus:
            yield f"{moment.given[name]} GPUs of {name} are assigned, it has {gpus}"
        if moment.used[name] > gpus:
            yield f"{moment.used[name]} GPUs of {name} are in use, it has {gpus}"
