"""Many jobs of several projects on many nodes, and what came of it, as figures."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import re
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import FakeNode, Informer, Json, Kubelet, TestCluster, path
from tests.e2e.deployment import Jobs, controller_process, scheduler_process
from tests.e2e.history import History
from tests.e2e.lab import training
from tinsmith_local.process import free_port

GPUS_PER_NODE = 8
WEIGHTS: Mapping[str, float] = {"gold": 2.0, "silver": 1.0, "bronze": 1.0}
_SHAPES = ((1, 1), (1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
"""Pods and GPUs of each: 1 to 64 GPUs."""
_HELD_S = (0.5, 2.0)
_URGENT = "test-crowd-urgent"
_PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
_TICK_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCrowdOutcome:
    """What came of a crowd.

    Attributes:
        num_jobs: Jobs, all of which succeeded.
        duration_s: From the first job to the last end.
        history: Every state on the way.
        gpu_seconds: GPU-seconds by project, while each of them had jobs that waited.
        backlogged_s: For how long that was.
        decision_s: Mean time of one decision about nodes.
        num_decisions: Decisions about nodes.
        num_writes: Requests of the controller that change something, leases apart.
        num_preemptions: Jobs that gave way.
        log: Of the controller.
    """

    num_jobs: int
    duration_s: float
    history: History
    gpu_seconds: Mapping[str, float]
    backlogged_s: float
    decision_s: float
    num_decisions: int
    num_writes: int
    num_preemptions: int
    log: str


def run_crowd(
    cluster: TestCluster,
    folder: Path,
    *,
    num_jobs: int,
    num_nodes: int,
    seed: int,
    timeout_s: float,
) -> JobCrowdOutcome:
    """Run a crowd until every job has succeeded.

    Raises:
        TimeoutError: If that takes too long.
    """
    with contextlib.ExitStack() as stack:
        namespaces = {name: stack.enter_context(cluster.namespace()) for name in WEIGHTS}
        stack.enter_context(_priority(cluster))
        scheduler = stack.enter_context(scheduler_process(folder))
        metrics_address = f"127.0.0.1:{free_port()}"
        controller = controller_process(
            cluster,
            folder,
            ",".join(namespaces.values()),
            scheduler.address,
            projects=",".join(f"{where}={name}" for name, where in namespaces.items()),
            queues_path=_queues(folder),
            lease_namespace=namespaces["gold"],
            lease_ttl_s=15,
            metrics_address=metrics_address,
        )
        tag = namespaces["gold"]
        nodes = [FakeNode(name=f"{tag}-n{i}", gpus=GPUS_PER_NODE) for i in range(num_nodes)]
        kubelet = stack.enter_context(cluster.kubelet(nodes, instant=True))
        history = History(cluster, list(namespaces.values()))
        stack.enter_context(_finisher(cluster, kubelet, set(namespaces.values()), seed))
        jobs = {name: Jobs(cluster, where) for name, where in namespaces.items()}
        with history:
            # All are there before the first decision, so that shares mean something.
            for name, job, spec in _specs(num_jobs, num_nodes, seed):
                jobs[name].create(job, spec)
            stack.enter_context(controller)
            begin_s = time.monotonic()
            _wait_all(jobs, controller.log, timeout_s)
            duration_s = time.monotonic() - begin_s
            metrics = _metrics(metrics_address)
        log = controller.log.read_text()
    shares, backlogged_s = _shares(history, {where: name for name, where in namespaces.items()})
    decisions = metrics["tinsmith_controller_assignment_duration_seconds_count"]
    return JobCrowdOutcome(
        num_jobs=num_jobs,
        duration_s=duration_s,
        history=history,
        gpu_seconds=shares,
        backlogged_s=backlogged_s,
        decision_s=metrics["tinsmith_controller_assignment_duration_seconds_sum"] / decisions,
        num_decisions=int(decisions),
        num_writes=int(metrics["writes"]),
        num_preemptions=int(metrics.get("preempted", 0)),
        log=log,
    )


def _specs(num_jobs: int, num_nodes: int, seed: int) -> Iterator[tuple[str, str, Json]]:
    """Yield project, name and spec of each job; one in ten is urgent, one in five stays put."""
    generator = random.Random(seed)
    shapes = [shape for shape in _SHAPES if shape[0] <= num_nodes]
    for number, name in zip(range(num_jobs), itertools.cycle(WEIGHTS), strict=False):
        trainers, gpus = generator.choice(shapes)
        scheduling: Json = {}
        if generator.random() < 0.1:
            scheduling["priorityClassName"] = _URGENT
        if generator.random() < 0.2:
            scheduling["preemptionPolicy"] = "Never"
        yield name, f"job-{number}", training(trainers, gpus, scheduling=scheduling)


def _queues(folder: Path) -> Path:
    target = folder / "queues.toml"
    tables = [f"[projects.{name}]\nweight = {weight}\n" for name, weight in WEIGHTS.items()]
    target.write_text("\n".join(tables))
    return target


@contextlib.contextmanager
def _priority(cluster: TestCluster) -> Iterator[None]:
    manifest = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 100}
    cluster.api.create(_PRIORITIES, {**manifest, "metadata": {"name": _URGENT}})
    try:
        yield
    finally:
        cluster.api.delete(f"{_PRIORITIES}/{_URGENT}")


@contextlib.contextmanager
def _finisher(
    cluster: TestCluster, kubelet: Kubelet, namespaces: set[str], seed: int
) -> Iterator[None]:
    """End each driver with success, some time after it began to run."""
    generator = random.Random(seed)
    changed = threading.Condition()
    due: list[tuple[float, str, str]] = []
    seen: set[str] = set()
    stopped = threading.Event()

    def on_pod(kind: str, pod: Json) -> None:
        metadata = pod["metadata"]
        is_new = metadata["uid"] not in seen and metadata["namespace"] in namespaces
        if kind != "DELETED" and is_new and pod["status"].get("phase") == "Running":
            seen.add(metadata["uid"])
            end_s = time.monotonic() + generator.uniform(*_HELD_S)
            with changed:
                heapq.heappush(due, (end_s, metadata["namespace"], metadata["name"]))

    def run() -> None:
        while not stopped.wait(_TICK_S):
            with changed:
                ripe = []
                while due and due[0][0] <= time.monotonic():
                    ripe.append(heapq.heappop(due))
            for _, namespace, name in ripe:
                if cluster.api.find(path("v1", "pods", namespace, name)) is not None:
                    with contextlib.suppress(RuntimeError):  # preempted at this moment
                        kubelet.end_pod(namespace, name, 0)

    drivers = {"labelSelector": "tinsmith.dev/role=driver"}
    informer = Informer(cluster.api, path("v1", "pods"), on_pod, drivers)
    informer.start()
    thread = threading.Thread(target=run, name="finisher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(10)
        informer.stop()


def _wait_all(jobs: Mapping[str, Jobs], log: Path, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while True:
        left = {
            f"{name}/{job['metadata']['name']}": job.get("status", {})
            for name, each in jobs.items()
            for job in each.all()
            if job.get("status", {}).get("phase") != "Succeeded"
        }
        if not left:
            return
        if time.monotonic() > end_s:
            raise TimeoutError(
                f"{len(left)} jobs: {list(left.items())[:3]}\n{log.read_text()[-2000:]}"
            )
        time.sleep(0.5)


def _metrics(address: str) -> dict[str, float]:
    """Return the figures of the controller that are of interest."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        name, _, value = line.rpartition(" ")
        if re.match(r"tinsmith_controller_api_requests_total\{method=\"(?!GET)", name):
            found["writes"] += float(value)
        elif name == 'tinsmith_controller_decisions_total{decision="preempted"}':
            found["preempted"] = float(value)
        elif not line.startswith("#"):
            found[name] = float(value)
    return found


def _shares(history: History, projects: Mapping[str, str]) -> tuple[dict[str, float], float]:
    """Return GPU-seconds by project while each had jobs that waited, and how long that was."""
    found = dict.fromkeys(projects.values(), 0.0)
    backlogged_s, before_s = 0.0, 0.0
    held: dict[str, int] = {}
    was_backlogged = False
    for moment, _ in history.moments():
        if was_backlogged:
            passed_s = moment.time_s - before_s
            backlogged_s += passed_s
            for project, gpus in held.items():
                found[project] += gpus * passed_s
        before_s = moment.time_s
        held = dict.fromkeys(projects.values(), 0)
        waiting = dict.fromkeys(projects.values(), 0)
        for workload in moment.workloads.values():
            project = projects[workload.namespace]
            held[project] += sum(entry.get("gpus", 0) for entry in workload.assignments)
            waiting[project] += workload.phase in ("Pending", "Queued")
        was_backlogged = all(waiting.values()) and any(held.values())
    return found, backlogged_s
