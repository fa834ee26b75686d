"""What holds for every cluster, and every set of jobs on it."""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections import defaultdict

from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.unit.controller.assignment_cases import NOW, ago, key, resources

from tinsmith_controller.assignment.decide import apply, decide
from tinsmith_controller.assignment.node_filters import find_obstacle
from tinsmith_controller.assignment.ordering import tier
from tinsmith_controller.assignment.types import (
    Decisions,
    Node,
    PodRequest,
    QueueConfig,
    Share,
    Stage,
    Taint,
    Workload,
)
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.quantities import Resources
from tinsmith_jobs.spec import Rules, Toleration
from tinsmith_jobs.status import Binding

QUEUES = ("default", "research")
PROJECTS = ("p", "q", "r")
RACKS = ("r0", "r1", "r2")
NODE_NAMES = tuple(f"n{i}" for i in range(6))


@st.composite
def some_nodes(draw: st.DrawFn) -> list[Node]:
    names = NODE_NAMES[: draw(st.sampled_from([5, 4, 3, 2, 0]))]
    return [
        Node(
            name,
            Resources(
                draw(st.sampled_from([96_000, 4000])), 2**40, draw(st.sampled_from([8, 4])), 12
            ),
            used=draw(st.sampled_from([Resources(), Resources(), resources(9, cpus=500)])),
            labels=draw(st.sampled_from([*({"rack": rack} for rack in RACKS), {}])),
            taints=draw(st.sampled_from([(), (), (Taint("own", "x"),)])),
            is_ready=draw(st.sampled_from([True, True, True, False])),
            is_cordoned=draw(st.sampled_from([False, False, False, True])),
            gpu_product=draw(st.sampled_from(["NVIDIA-H100", "NVIDIA-H200"])),
            gpu_memory_gib=draw(st.sampled_from([80, 141])),
        )
        for name in names
    ]


some_rules = st.builds(
    Rules,
    node_selector=st.sampled_from([{}, {}, {}, {}, {"rack": "r1"}]),
    tolerations=st.sampled_from([(), (Toleration("own", "Exists"),)]),
    gpu_products=st.sampled_from([(), (), (), ("NVIDIA-H100",)]),
    min_gpu_memory_gib=st.sampled_from([0, 0, 0, 100]),
    required_level=st.sampled_from(["", "", "", "rack"]),
    preferred_level=st.sampled_from(["", "rack"]),
)


@st.composite
def a_workload(draw: st.DrawFn, name: str) -> Workload:
    is_pool = draw(st.integers(0, 4)) == 0
    stage = draw(st.sampled_from([Stage.WAITING, Stage.WAITING, Stage.HOLDING, Stage.RELEASING]))
    each = resources(draw(st.sampled_from([4, 1, 8, 2, 0])), cpus=draw(st.sampled_from([1, 3])))
    placed = (
        ()
        if stage is Stage.WAITING
        else tuple(
            Binding("trainer", 100 + i, where, each)
            for i, where in enumerate(draw(st.lists(st.sampled_from(NODE_NAMES), max_size=4)))
        )
    )
    wanted = draw(st.sampled_from([1, 2, 3, 5] if stage is Stage.WAITING else [0, 1, 2]))
    return Workload(
        key=key(name, "TrainerPool" if is_pool else "TrainingJob"),
        project="" if is_pool else draw(st.sampled_from(PROJECTS)),
        queue=draw(st.sampled_from(QUEUES)),
        priority=draw(st.integers(0, 3)),
        created=ago(10_000),
        queued=ago(draw(st.integers(0, 1200))),
        stage=stage,
        pods=tuple(
            PodRequest(draw(st.sampled_from(["trainer", "trainer", "sampler"])), i, each)
            for i in range(wanted)
        ),
        placed=placed,
        rules=draw(some_rules),
        role_rules=draw(st.sampled_from([{}, {"sampler": Rules(node_selector={"rack": "r0"})}])),
        unplaced=draw(st.sampled_from([(), (), ("sampler",)])),
        is_gang=not is_pool,
        is_preemptible=not is_pool and draw(st.sampled_from([True, True, False])),
        assigned=ago(draw(st.integers(0, 5000))) if placed else None,
    )


@st.composite
def some_workloads(draw: st.DrawFn) -> list[Workload]:
    return [draw(a_workload(f"w{i}")) for i in range(draw(st.sampled_from([8, 6, 4, 2, 0])))]


def busy_cluster(seed: int) -> tuple[list[Workload], list[Node]]:
    """Return a cluster that was filled in two passes, and jobs that came since."""
    chance = random.Random(seed)
    nodes = [
        Node(
            f"n{i}",
            Resources(96_000, 2**40, 8, 110),
            labels={"rack": f"r{i // 3}"},
            is_ready=chance.random() > 0.05,
        )
        for i in range(chance.randint(3, 9))
    ]

    def some(name: str, waited_s: int, priorities: list[int]) -> Workload:
        is_pool = chance.random() < 0.1
        each = resources(chance.choice([1, 2, 4, 8, 8]), cpus=chance.choice([1, 10, 40]))
        count = chance.choice([1, 1, 2, 2, 3, 5])
        extra = (PodRequest("sampler", 0, resources(chance.choice([0, 1, 2]))),)
        return Workload(
            key=key(name, "TrainerPool" if is_pool else "TrainingJob"),
            project="" if is_pool else chance.choice(PROJECTS),
            queue=chance.choice(QUEUES),
            priority=chance.choice(priorities),
            created=ago(20_000),
            queued=ago(waited_s),
            stage=Stage.WAITING,
            pods=tuple(PodRequest("trainer", i, each) for i in range(count))
            + (extra if chance.random() < 0.3 else ()),
            rules=Rules(
                required_level=chance.choice(["", "", "rack"]),
                preferred_level=chance.choice(["", "rack"]),
            ),
            is_gang=not is_pool,
            is_preemptible=not is_pool and chance.random() < 0.8,
        )

    workloads: list[Workload] = []
    for generation, since_s in enumerate((9000, 5000)):
        workloads += [some(f"old{generation}-{i}", since_s + i, [0, 0, 1]) for i in range(6)]
        then = ago(since_s)
        decisions = decide(workloads, nodes, QueueConfig(), then)
        workloads = [
            w if w.stage is not Stage.RELEASING else dataclasses.replace(w, pods=())
            for w in apply(workloads, decisions, then)
        ]
    hurt = [
        dataclasses.replace(
            w,
            placed=w.placed[1:],
            pods=tuple(PodRequest(p.role, p.index, p.resources) for p in w.placed[:1]),
        )
        if w.stage is Stage.HOLDING and len(w.placed) > 1 and chance.random() < 0.2
        else w
        for w in workloads
    ]
    new = [some(f"new{i}", chance.randint(0, 1200), [0, 1, 2, 3]) for i in range(6)]
    return hurt + new, nodes


some_policies = st.builds(
    QueueConfig,
    queues=st.sampled_from(
        [{}, {}, {"default": Share()}, {"default": Share(), "research": Share(max_gpus=10)}]
    ),
    projects=st.sampled_from([{}, {"p": Share(max_gpus=6), "q": Share(weight=2.0)}]),
    backfill_patience_s=st.sampled_from([0.0, 600.0, float("inf")]),
)


@settings(max_examples=75, deadline=None)
@for_all(some_workloads(), some_nodes(), some_policies)
def test_decisions_are_sound(
    workloads: list[Workload], nodes: list[Node], policy: QueueConfig
) -> None:
    decisions = decide(workloads, nodes, policy, NOW)

    _check_capacity(workloads, nodes, decisions)
    _check_gangs(workloads, nodes, decisions)
    _check_quotas(workloads, policy, decisions)
    _check_preemption(workloads, decisions)
    _check_waiting(workloads, decisions)


@settings(max_examples=75, deadline=None)
@for_all(st.integers(0, 2**32), some_policies)
def test_decisions_on_a_busy_cluster_are_sound(seed: int, policy: QueueConfig) -> None:
    workloads, nodes = busy_cluster(seed)

    decisions = decide(workloads, nodes, policy, NOW)

    _check_capacity(workloads, nodes, decisions)
    _check_gangs(workloads, nodes, decisions)
    _check_quotas(workloads, policy, decisions)
    _check_preemption(workloads, decisions)
    _check_waiting(workloads, decisions)
    _check_victims_are_needed(workloads, nodes, policy, decisions)
    again = decide(apply(workloads, decisions, NOW), nodes, policy, NOW)
    assert again == Decisions({}, {}, decisions.waiting, unfit=decisions.unfit)


@settings(max_examples=50, deadline=None)
@for_all(some_workloads(), some_nodes(), some_policies, st.randoms(use_true_random=False))
def test_order_of_the_input_does_not_matter(
    workloads: list[Workload], nodes: list[Node], policy: QueueConfig, random: object
) -> None:
    decisions = decide(workloads, nodes, policy, NOW)

    random.shuffle(workloads)  # type: ignore[attr-defined]
    random.shuffle(nodes)  # type: ignore[attr-defined]

    assert decide(workloads, nodes, policy, NOW) == decisions


@settings(max_examples=50, deadline=None)
@for_all(some_workloads(), some_nodes(), some_policies)
def test_second_pass_changes_nothing(
    workloads: list[Workload], nodes: list[Node], policy: QueueConfig
) -> None:
    decisions = decide(workloads, nodes, policy, NOW)

    again = decide(apply(workloads, decisions, NOW), nodes, policy, NOW)

    assert again == Decisions({}, {}, decisions.waiting, unfit=decisions.unfit)


@settings(max_examples=50, deadline=None)
@for_all(some_workloads(), some_nodes())
def test_no_priority_inversion(workloads: list[Workload], nodes: list[Node]) -> None:
    """A job that fits on what is free after the pass got it, or one before it keeps it away."""
    decisions = decide(workloads, nodes, QueueConfig(backfill_patience_s=600), NOW)
    after = apply(workloads, decisions, NOW)
    holding = [w for w in after if w.placed]
    left = [w for w in after if w.pods and w.stage is not Stage.RELEASING and w.is_gang]

    for workload in left:
        others = [w for w in holding if w.key != workload.key]
        others = [dataclasses.replace(w, pods=()) for w in others]
        fits = workload.key in decide([*others, workload], nodes, QueueConfig(), NOW).assign
        sentence = decisions.waiting[workload.key]
        if not fits:
            continue
        before = [w for w in left if str(w.key) in sentence and tier(w) <= tier(workload)]
        pools = [w for w in after if w.pods and not w.is_gang and str(w.key) in sentence]
        assert before or pools, sentence


amounts = st.integers(-(10**30), 10**30)
times = st.one_of(
    st.datetimes(), st.datetimes(timezones=st.just(datetime.UTC)), st.just(NOW), st.just(ago(60))
)
any_resources = st.builds(Resources, amounts, amounts, amounts, amounts)
any_name = st.sampled_from(["", "a", "b"])
any_key = st.builds(
    NamespacedName, st.sampled_from(["TrainingJob", "TrainerPool"]), any_name, any_name
)
any_labels = st.dictionaries(any_name, any_name, max_size=2)
any_rules = st.builds(
    Rules, any_labels, gpu_products=st.just(()), required_level=any_name, preferred_level=any_name
)
any_node = st.builds(
    Node, any_name, any_resources, any_labels, used=any_resources, is_ready=st.just(True)
)
any_pod = st.builds(PodRequest, any_name, st.integers(0, 2), any_resources)
any_binding = st.builds(Binding, any_name, st.integers(0, 2), any_name, any_resources)
any_workload = st.builds(
    Workload,
    any_key,
    any_name,
    any_name,
    st.integers(),
    times,
    times,
    st.sampled_from(Stage),
    st.lists(any_pod, max_size=3).map(tuple),
    st.lists(any_binding, max_size=3).map(tuple),
    any_rules,
    st.booleans(),
    st.booleans(),
    st.none() | times,
    st.none() | any_key,
)
any_share = st.builds(Share, st.none() | st.integers(), st.floats())
any_policy = st.builds(
    QueueConfig,
    st.dictionaries(any_name, any_share, max_size=2),
    st.dictionaries(any_name, any_share, max_size=2),
    st.floats(),
)


@settings(max_examples=75, deadline=None)
@for_all(st.lists(any_workload, max_size=5), st.lists(any_node, max_size=4), any_policy, times)
def test_nothing_makes_it_raise(
    workloads: list[Workload], nodes: list[Node], policy: QueueConfig, now: datetime.datetime
) -> None:
    decisions = decide(workloads, nodes, policy, now)

    assert decide(workloads[::-1], nodes[::-1], policy, now) == decisions


def _check_capacity(workloads: list[Workload], nodes: list[Node], decisions: Decisions) -> None:
    free = {node.name: node.allocatable - node.used for node in nodes}
    for workload in workloads:
        for binding in workload.placed:
            if binding.node in free:
                free[binding.node] -= binding.resources
    for bindings in decisions.assign.values():
        for binding in bindings:
            assert binding.resources.fits_in(free[binding.node])
            free[binding.node] -= binding.resources


def _check_gangs(workloads: list[Workload], nodes: list[Node], decisions: Decisions) -> None:
    by_name = {node.name: node for node in nodes}
    by_key = {workload.key: workload for workload in workloads}
    for workload_key, bindings in decisions.assign.items():
        workload = by_key[workload_key]
        assert workload.stage is not Stage.RELEASING
        wanted = {(pod.role, pod.index): pod.resources for pod in workload.pods}
        got = {(p.role, p.index): p.resources for p in bindings}
        assert len(got) == len(bindings)
        assert got.items() <= wanted.items()
        assert got == wanted or not workload.is_gang
        for binding in bindings:
            node = by_name[binding.node]
            has_gpus = binding.resources.gpus > 0
            assert find_obstacle(node, workload.rules_of(binding.role), has_gpus=has_gpus) is None
        level = workload.rules.required_level
        if level:
            on = {p.node for p in bindings}
            assert all(level in by_name[name].labels for name in on)
            on |= {p.node for p in workload.placed if p.node in by_name}
            values = [by_name[name].labels.get(level) for name in on]
            assert len({value for value in values if value is not None}) == 1


def _check_quotas(workloads: list[Workload], policy: QueueConfig, decisions: Decisions) -> None:
    held: dict[tuple[str, str], int] = defaultdict(int)
    growing: set[tuple[str, str]] = set()
    for workload in workloads:
        given = sum(p.resources.gpus for p in decisions.assign.get(workload.key, ()))
        for scope in (("queue", workload.queue), ("project", workload.project)):
            held[scope] += workload.num_gpus_held + given
            growing |= {scope} if given else set()
        if workload.key in decisions.assign and policy.queues:
            assert workload.queue in policy.queues
    for kind, name in growing:
        share = (policy.queues if kind == "queue" else policy.projects).get(name)
        assert share is None or share.max_gpus is None or held[kind, name] <= share.max_gpus


def _check_preemption(workloads: list[Workload], decisions: Decisions) -> None:
    by_key = {workload.key: workload for workload in workloads}
    for victim_key, for_key in decisions.preempt.items():
        victim = by_key[victim_key]
        assert victim.stage is Stage.HOLDING
        assert victim.is_preemptible
        assert victim.priority < by_key[for_key].priority
        assert victim_key not in decisions.assign
        assert for_key in decisions.waiting


def _check_victims_are_needed(
    workloads: list[Workload], nodes: list[Node], policy: QueueConfig, decisions: Decisions
) -> None:
    """A job that preempts fits without its victims, and does not with one of them."""
    after = apply(workloads, decisions, NOW)
    for for_key in set(decisions.preempt.values()):
        wanting = next(w for w in after if w.key == for_key)
        gone = {victim for victim, for_whom in decisions.preempt.items() if for_whom == for_key}
        rest = [
            dataclasses.replace(w, pods=())
            for w in after
            if w.placed and w.stage is not Stage.RELEASING and w.key != for_key
        ]
        num_awaiting = sum(s.startswith("waits for") for s in decisions.waiting.values())
        if num_awaiting == 1 and wanting.is_gang and policy.backfill_patience_s > 1200:
            assert for_key in decide([*rest, wanting], nodes, policy, NOW).assign
            leaving = [w for w in after if w.stage is Stage.RELEASING]
            if len(leaving) > len(gone):
                continue
            for kept in leaving:
                stays = dataclasses.replace(kept, stage=Stage.HOLDING, is_preemptible=False)
                one_more = [*rest, dataclasses.replace(stays, pods=()), wanting]
                assert for_key not in decide(one_more, nodes, policy, NOW).assign


def _check_waiting(workloads: list[Workload], decisions: Decisions) -> None:
    for workload in workloads:
        wants = bool(workload.pods) and workload.stage is not Stage.RELEASING
        got = len(decisions.assign.get(workload.key, ()))
        is_left = wants and got < len(workload.pods) and workload.key not in decisions.preempt
        assert (workload.key in decisions.waiting) == is_left
