"""A cluster in which time is a number: jobs come, run, lose nodes, give way, and end.

Every event is followed by one pass of the assignment, whose decisions are carried out at once.
After each the state is checked: no GPU is held twice, and no job holds only some of its pods.
"""

from __future__ import annotations

import dataclasses
import datetime
import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tinsmith_controller.assignment.decide import apply, decide
from tinsmith_controller.assignment.types import (
    Decisions,
    Node,
    PodRequest,
    QueueConfig,
    Stage,
    Workload,
)
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.quantities import Resources

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
GPUS_OF_NODE = 8
SAVE_S = 30.0
# The controller looks again after this long even if nothing happens: patience ends by itself.
RESYNC_S = 60.0


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job that will come.

    Attributes:
        name: Its name.
        project: Whose it is.
        pods: GPUs of each pod.
        arrival_s: When it comes.
        duration_s: How long it runs, in all.
        priority: Its priority.
    """

    name: str
    project: str
    pods: tuple[int, ...]
    arrival_s: float
    duration_s: float
    priority: int = 0

    @property
    def num_gpus(self) -> int:
        return sum(self.pods)


@dataclass(frozen=True, slots=True)
class Failure:
    """A node that is away for a while."""

    node: str
    at_s: float
    repair_s: float


@dataclass(slots=True)
class _Run:
    job: SimulatedJob
    workload: Workload
    left_s: float
    runs_since_s: float | None = None
    generation: int = 0


@dataclass(slots=True)
class Log:
    """What happened.

    Attributes:
        started_s: When each job first got its nodes.
        ended_s: When each job ended.
        gpu_seconds: GPU time held by project.
        num_passes: How often the assignment was asked.
        num_preemptions: How often a job gave way.
        num_replacements: How often a job got a node for a pod that it lost.
        now_s: The time.
    """

    started_s: dict[str, float] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    gpu_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_passes: int = 0
    num_preemptions: int = 0
    num_replacements: int = 0
    now_s: float = 0.0

    def utilisation(self, num_gpus: int) -> float:
        """Return the part of all GPU time that was held."""
        return sum(self.gpu_seconds.values()) / (num_gpus * self.now_s)


def simulated_nodes(count: int) -> list[Node]:
    allocatable = Resources(cpu_milli=192_000, memory_bytes=2**41, gpus=GPUS_OF_NODE, pods=110)
    return [Node(f"node-{i:04}", allocatable, gpu_product="NVIDIA-H200") for i in range(count)]


def mixed_jobs(count: int, seed: int, *, arrivals_s: float) -> list[SimulatedJob]:
    """Return jobs of all sizes and three projects, spread over the first seconds."""
    chance = random.Random(seed)
    sizes = [(1,), (1,), (2,), (4,), (8,), (8, 8), (8,) * 4, (8,) * 8, (4, 2, 2)]
    return [
        SimulatedJob(
            name=f"job-{i:03}",
            project=chance.choice(["red", "green", "blue"]),
            pods=chance.choice(sizes),
            arrival_s=chance.uniform(0, arrivals_s),
            duration_s=chance.uniform(120, 3600),
            priority=chance.choice([0, 0, 0, 0, 10]),
        )
        for i in range(count)
    ]


def backlogged_jobs(each: int, seed: int, *, max_nodes: int) -> list[SimulatedJob]:
    """Return the same mix of jobs for three projects, all there from the beginning."""
    chance = random.Random(seed)
    sizes = [(1,), (2,), (4,), *((8,) * 2**i for i in range(max_nodes.bit_length()))]
    return [
        SimulatedJob(
            f"{project}-{i:04}",
            project,
            chance.choice(sizes),
            arrival_s=i * 0.001,
            duration_s=chance.uniform(300, 1800),
        )
        for project in ("red", "green", "blue")
        for i in range(each)
    ]


class Simulation:
    """Runs jobs on nodes.

    Args:
        jobs: The jobs.
        nodes: The nodes.
        policy: The operators' settings.
        failures: Nodes that are away for a while.
    """

    def __init__(
        self,
        jobs: Iterable[SimulatedJob],
        nodes: Sequence[Node],
        policy: QueueConfig,
        failures: Iterable[Failure] = (),
    ) -> None:
        self.log = Log()
        self._policy = policy
        self._nodes = {node.name: node for node in nodes}
        self._runs: dict[NamespacedName, _Run] = {}
        self._number = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for job in jobs:
            self._at(job.arrival_s, lambda job=job: self._arrive(job))  # type: ignore[misc]
        for failure in failures:
            self._at(failure.at_s, lambda node=failure.node: self._fail(node))  # type: ignore[misc]
            self._at(
                failure.at_s + failure.repair_s,
                lambda node=failure.node: self._repair(node),  # type: ignore[misc]
            )

    @property
    def waiting(self) -> dict[str, int]:
        """Return how many jobs wait, by project."""
        counts: dict[str, int] = defaultdict(int)
        for run in self._runs.values():
            counts[run.job.project] += run.workload.stage is Stage.WAITING
        return counts

    def step(self) -> bool:
        """Carry out what is next and decide; False when nothing is left to happen."""
        if not self._events:
            return False
        at_s = self._events[0][0]
        has_waiting = any(run.workload.pods for run in self._runs.values())
        if has_waiting and at_s > self.log.now_s + RESYNC_S:
            self._pass_time(self.log.now_s + RESYNC_S)
        else:
            self._pass_time(at_s)
            while self._events and self._events[0][0] <= at_s:
                heapq.heappop(self._events)[2]()
        self._decide()
        return True

    def run(self, *, max_passes: int) -> Log:
        """Run until nothing is left to happen.

        Raises:
            TimeoutError: If that takes more passes: a job waits for ever.
        """
        while self.step():
            if self.log.num_passes > max_passes:
                raise TimeoutError(
                    f"still not done at {self.log.now_s:.0f} s: {dict(self.waiting)}"
                )
        return self.log

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._number), act))

    def _pass_time(self, to_s: float) -> None:
        for run in self._runs.values():
            held = run.workload.num_gpus_held
            self.log.gpu_seconds[run.job.project] += held * (to_s - self.log.now_s)
        self.log.now_s = to_s

    def _time(self) -> datetime.datetime:
        return START + datetime.timedelta(seconds=self.log.now_s)

    def _arrive(self, job: SimulatedJob) -> None:
        key = NamespacedName("TrainingJob", job.project, job.name)
        pods = tuple(
            PodRequest("trainer", i, Resources(gpus * 8000, gpus * 2**36, gpus, 1))
            for i, gpus in enumerate(job.pods)
        )
        now = self._time()
        workload = Workload(
            key, job.project, "default", job.priority, now, now, Stage.WAITING, pods
        )
        self._runs[key] = _Run(job, workload, job.duration_s)

    def _fail(self, name: str) -> None:
        self._nodes[name] = dataclasses.replace(self._nodes[name], is_ready=False)
        for run in self._runs.values():
            lost = [p for p in run.workload.placed if p.node == name]
            if not lost:
                continue
            self._pause(run)
            pods = tuple(PodRequest(p.role, p.index, p.resources) for p in lost)
            kept = tuple(p for p in run.workload.placed if p.node != name)
            stage = run.workload.stage
            if stage is Stage.HOLDING and not kept:
                stage = Stage.WAITING
            run.workload = dataclasses.replace(
                run.workload,
                placed=kept,
                pods=run.workload.pods + pods,
                stage=stage,
                assigned=run.workload.assigned if kept else None,
            )

    def _repair(self, name: str) -> None:
        self._nodes[name] = dataclasses.replace(self._nodes[name], is_ready=True)

    def _pause(self, run: _Run) -> None:
        if run.runs_since_s is not None:
            run.left_s -= self.log.now_s - run.runs_since_s
            run.runs_since_s = None
            run.generation += 1

    def _resume(self, run: _Run) -> None:
        run.runs_since_s = self.log.now_s
        run.generation += 1
        generation = run.generation
        self._at(self.log.now_s + run.left_s, lambda: self._end(run, generation))

    def _end(self, run: _Run, generation: int) -> None:
        if run.generation == generation:
            self.log.ended_s[run.job.name] = self.log.now_s
            del self._runs[run.workload.key]

    def _leave(self, run: _Run) -> None:
        """Go back to waiting, with everything saved."""
        workload = run.workload
        pods = workload.pods + tuple(
            PodRequest(p.role, p.index, p.resources) for p in workload.placed
        )
        run.workload = dataclasses.replace(
            workload, stage=Stage.WAITING, pods=pods, placed=(), assigned=None, preempted_by=None
        )

    def _decide(self) -> None:
        before = {key: run.workload for key, run in self._runs.items()}
        nodes = list(self._nodes.values())
        decisions = decide(list(before.values()), nodes, self._policy, self._time())
        self.log.num_passes += 1
        for workload in apply(before.values(), decisions, self._time()):
            self._runs[workload.key].workload = workload
        for key in decisions.preempt:
            run = self._runs[key]
            self.log.num_preemptions += 1
            self._pause(run)
            self._at(self.log.now_s + SAVE_S, lambda run=run: self._leave(run))  # type: ignore[misc]
        for key in decisions.assign:
            run = self._runs[key]
            self.log.num_replacements += before[key].stage is Stage.HOLDING
            self.log.started_s.setdefault(run.job.name, self.log.now_s)
            self._resume(run)
        self._check(before, decisions)

    def _check(self, before: dict[NamespacedName, Workload], decisions: Decisions) -> None:
        free = {name: node.allocatable for name, node in self._nodes.items()}
        for key, run in self._runs.items():
            workload = run.workload
            for binding in workload.placed:
                left = free[binding.node] - binding.resources
                assert min(left.gpus, left.cpu_milli, left.memory_bytes, left.pods) >= 0
                free[binding.node] = left
            num_pods = len(workload.pods) + len(workload.placed)
            assert num_pods == len(run.job.pods), f"{key} has {num_pods} pods"
            if key in decisions.assign:
                assert not workload.pods, f"{key} got only some of its pods"
                assert all(self._nodes[p.node].is_ready for p in decisions.assign[key])
            assert (workload.stage is Stage.WAITING) <= (not workload.placed)
        for victim, for_whom in decisions.preempt.items():
            assert before[victim].priority < before[for_whom].priority
