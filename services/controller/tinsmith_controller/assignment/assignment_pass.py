"""One assignment pass: every workload is considered once, in order."""

from __future__ import annotations

import bisect
import dataclasses
import datetime
from collections.abc import Hashable, Sequence

import numpy as np

from tinsmith_controller.assignment import backfill, preemption
from tinsmith_controller.assignment.capacity import GPUS, Cluster, Room, Spread, seconds
from tinsmith_controller.assignment.explanations import (
    Behind,
    NoNode,
    NoRoom,
    Releasing,
    UnknownQueue,
    Verdict,
    explain,
)
from tinsmith_controller.assignment.gang_assignment import (
    Gang,
    Group,
    place,
    place_soonest,
    prepare,
)
from tinsmith_controller.assignment.node_filters import Obstacle
from tinsmith_controller.assignment.ordering import Tier, WorkloadOrder, rank, tier
from tinsmith_controller.assignment.quotas import Quotas
from tinsmith_controller.assignment.types import (
    Decisions,
    Node,
    PodRequest,
    QueueConfig,
    Stage,
    Workload,
)
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.status import Binding


class AssignmentPass:
    """Asks every workload once.

    Args:
        workloads: All of them, each once.
        nodes: The nodes.
        policy: The operators' settings.
        now: The time.
    """

    def __init__(
        self,
        workloads: Sequence[Workload],
        nodes: Sequence[Node],
        policy: QueueConfig,
        now: datetime.datetime,
    ) -> None:
        self._policy = policy
        self._now = now
        self._cluster = Cluster(nodes, workloads, now)
        self._quotas = Quotas(policy, workloads)
        self._order = WorkloadOrder(workloads, policy)
        self._spreads: dict[NamespacedName, Spread] = {}
        self._releasing = [w for w in workloads if w.stage is Stage.RELEASING]
        awaited = {w.preempted_by for w in self._releasing}
        self._victims = [
            w for w in workloads if preemption.may_be_preempted(w, now) and w.key not in awaited
        ]
        self._kept: Room = np.zeros_like(self._cluster.free)
        self._keepers: list[tuple[Workload, Spread]] = []
        self._has_reserved = False
        self._tier: Tier | None = None
        self._barrier: tuple[Workload, Spread] | None = None
        # Room only shrinks in a round, so what did not fit does not fit later.
        self._unfit: set[Hashable] = set()
        self._unhelped: set[Hashable] = set()
        self._too_small: dict[Hashable, Room | None] = {}
        self._behind: dict[Hashable, Behind | None] = {}
        self._assign: dict[NamespacedName, tuple[Binding, ...]] = {}
        self._preempt: dict[NamespacedName, NamespacedName] = {}
        self._verdicts: dict[NamespacedName, tuple[Workload, Verdict]] = {}
        self._sentences: dict[Hashable, str] = {}

    def run(self) -> Decisions:
        """Return what the round decides."""
        while (workload := self._order.next()) is not None:
            if tier(workload) != self._tier:
                self._tier = tier(workload)
                self._bar_the_way()
            if workload.key in self._preempt:
                continue
            if self._barrier is not None and self._barrier[0] is workload:
                self._barrier = None  # from here on it keeps what it does not get
                self._has_reserved = False
            for pods in self._parts(workload):
                verdict = self._ask(workload, pods)
                if verdict is not None:
                    self._verdicts.setdefault(workload.key, (workload, verdict))
                elif not workload.is_gang:  # the next replica has to go where the last one did
                    placed = workload.placed + self._assign[workload.key][-len(pods) :]
                    workload = dataclasses.replace(workload, placed=placed)
        waiting = {key: self._explain(*found) for key, found in self._verdicts.items()}
        verdicts = self._verdicts.items()
        unfit = frozenset(key for key, (_, verdict) in verdicts if self._is_lasting(verdict))
        return Decisions(self._assign, self._preempt, waiting, unfit=unfit)

    def _explain(self, workload: Workload, verdict: Verdict) -> str:
        if not isinstance(verdict, NoRoom):
            return explain(workload, verdict, self._cluster)
        key = (verdict.gang.signature, verdict.empty is None)
        if key not in self._sentences:  # equal pods miss the same room
            self._sentences[key] = explain(workload, verdict, self._cluster)
        return self._sentences[key]

    def _bar_the_way(self) -> None:
        """Keep nodes for the first of the tier that is overdue and does not fit, before all others.

        Others may come before it because their projects have less. Those who have waited longer go
        ahead; the others would, as an endless stream, keep it waiting for ever.
        """
        self._barrier = None
        for workload in self._order.peers():
            if not workload.is_gang or not backfill.is_overdue(workload, self._policy, self._now):
                continue
            if self._find_no_node(workload) is not None:
                continue
            gang = prepare(self._cluster, workload, workload.pods)
            if (
                not self._quotas.has_queue(workload)
                or self._quotas.excess(workload, workload.num_gpus_wanted) is not None
                or place(gang, self._cluster.free - self._kept) is not None
            ):
                continue
            spots = self._soonest(workload, gang)
            if spots is not None:
                spread = self._cluster.spread(self._cluster.bindings(gang.pods, spots))
                self._barrier = (workload, spread)
                return

    def _kept_from(self, workload: Workload) -> Room:
        if self._barrier is None or not self._is_barred(workload):
            return self._kept
        kept = self._kept.copy()
        self._barrier[1].add_to(kept)
        return kept

    def _is_barred(self, workload: Workload) -> bool:
        return self._barrier is not None and rank(self._barrier[0]) < rank(workload)

    def _parts(self, workload: Workload) -> list[Sequence[PodRequest]]:
        """Return the pods that are placed together: all of a job, as many as fit of a pool."""
        pods = workload.pods
        if workload.is_gang:
            return [pods]
        room = self._cluster.free - self._kept_from(workload)

        def is_too_many(count: int) -> bool:
            first = pods[:count]
            num_gpus = sum(pod.resources.gpus for pod in first)
            if self._quotas.excess(workload, num_gpus) is not None:
                return True
            return place(prepare(self._cluster, workload, first), room) is None

        count = bisect.bisect_left(range(1, len(pods) + 1), True, key=is_too_many)
        return [*([pods[:count]] if count else []), *((pod,) for pod in pods[count:])]

    def _ask(self, workload: Workload, pods: Sequence[PodRequest]) -> Verdict | None:
        """Place the pods, all or none, or say why not."""
        if not self._quotas.has_queue(workload):
            return UnknownQueue(tuple(sorted(self._policy.queues)))
        nowhere = self._find_no_node(workload)
        if nowhere is not None:
            return nowhere
        gang = prepare(self._cluster, workload, pods)
        num_gpus = sum(pod.resources.gpus for pod in pods)
        excess = self._quotas.excess(workload, num_gpus)
        if excess is None and self._place(workload, gang, num_gpus):
            return None
        if excess is not None and excess.is_own:
            return excess
        empty = self._find_too_small(workload, gang)
        if empty is not None:
            return NoRoom(gang, empty)
        leaving = self._await(workload, gang, num_gpus)
        if leaving is not None:
            return leaving
        if backfill.is_overdue(workload, self._policy, self._now):
            if excess is not None:
                self._quotas.keep(workload, num_gpus)
            elif not self._has_reserved:
                self._reserve(workload, gang)
        return excess or self._find_keeper(workload, gang) or NoRoom(gang, None)

    def _find_no_node(self, workload: Workload) -> NoNode | None:
        """Return pods that no node would do for, of those that the cluster's scheduler places."""
        if workload.stage is not Stage.WAITING:
            return None
        for role in workload.unplaced:
            rules = workload.rules_of(role)
            eligible = self._cluster.eligible(rules, has_gpus=False)
            if not eligible.any():
                return NoNode(Group(np.zeros(4), (), eligible, rules, role))
        return None

    def _place(self, workload: Workload, gang: Gang, num_gpus: int) -> bool:
        key = (gang.signature, self._is_barred(workload))
        if key in self._unfit:
            return False
        spots = place(gang, self._cluster.free - self._kept_from(workload))
        if spots is None:
            self._unfit.add(key)
            return False
        bindings = self._cluster.bindings(gang.pods, spots)
        self._cluster.assign(workload, bindings)
        self._quotas.take(workload, num_gpus)
        self._order.gave(workload, num_gpus)
        self._assign[workload.key] = self._assign.get(workload.key, ()) + bindings
        return True

    def _find_too_small(self, workload: Workload, gang: Gang) -> Room | None:
        """Return the room if no other job ran, if not even that will do."""
        key = (gang.signature, workload.key if workload.placed else None)
        if key not in self._too_small:
            empty = self._cluster.drained(workload)
            self._too_small[key] = empty if place(gang, empty) is None else None
        return self._too_small[key]

    def _await(self, workload: Workload, gang: Gang, num_gpus: int) -> Releasing | None:
        """Keep what others are leaving, and ask more to leave if that is not enough."""
        soon = self._cluster.free + self._cluster.releasing - self._kept_from(workload)
        excess = self._quotas.excess(workload, num_gpus, without=self._releasing)
        if self._releasing and excess is None:
            spots = place(gang, soon)
            if spots is not None:
                self._keep(workload, gang, spots)
                return self._describe_releasing(workload, spots)
        victims = self._choose_victims(workload, gang, num_gpus, soon)
        if not victims:
            return None
        for victim in victims:
            self._cluster.release(victim)
            self._cluster.spread(victim.placed).add_to(soon)
            self._preempt[victim.key] = workload.key
        # A workload that others give way to is spared until it has its nodes: else they would
        # give way for nothing.
        spared = {workload.key, *self._preempt}
        self._victims = [other for other in self._victims if other.key not in spared]
        self._releasing += victims
        spots = place(gang, soon)
        if spots is not None:
            self._keep(workload, gang, spots)
        return Releasing(tuple(victim.key for victim in victims), is_preempted=True)

    def _choose_victims(
        self, workload: Workload, gang: Gang, num_gpus: int, soon: Room
    ) -> tuple[Workload, ...]:
        if (gang.signature, workload.priority) in self._unhelped:
            return ()
        lower = [
            victim
            for victim in self._victims
            if victim.priority < workload.priority and victim.key not in self._assign
        ]
        spreads = self._spreads
        for victim in lower:
            if victim.key not in spreads:
                spreads[victim.key] = self._cluster.spread(victim.placed)

        def room_without(victims: Sequence[Workload]) -> Room:
            room = soon.copy()
            Spread.union([spreads[victim.key] for victim in victims]).add_to(room)
            return room

        if not lower or place(gang, room_without(lower)) is None:
            self._unhelped.add((gang.signature, workload.priority))
            return ()

        def suffices(victims: Sequence[Workload]) -> bool:
            gone = [*self._releasing, *victims]
            if self._quotas.excess(workload, num_gpus, without=gone) is not None:
                return False
            return place(gang, room_without(victims)) is not None

        def by_node(*, is_whole: bool) -> list[Workload]:
            lost = np.zeros(len(self._cluster.nodes))
            for victim in lower:
                spread = spreads[victim.key]
                whole = float(victim.num_gpus_held)
                np.add.at(lost, spread.nodes, whole if is_whole else spread.amounts[GPUS])
            ranking = np.lexsort((np.arange(len(lost)), lost))
            spots = set(place_soonest(gang, room_without(lower), ranking) or ())
            on = [v for v in lower if not spots.isdisjoint(spreads[v.key].nodes.tolist())]
            return preemption.cheapest_first(on)

        proposals = [
            by_node(is_whole=False),
            by_node(is_whole=True),
            preemption.cheapest_first(lower),
            preemption.smallest_first(lower),
        ]
        return preemption.choose_victims(proposals, suffices)

    def _reserve(self, workload: Workload, gang: Gang) -> None:
        spots = self._soonest(workload, gang)
        if spots is not None:
            self._keep(workload, gang, spots)
            self._has_reserved = True

    def _soonest(self, workload: Workload, gang: Gang) -> list[int] | None:
        since_s = seconds(workload.queued) + self._policy.backfill_patience_s
        kept = self._kept_from(workload)
        return backfill.reserve(self._cluster, gang, workload, kept, since_s)

    def _keep(self, workload: Workload, gang: Gang, spots: Sequence[int]) -> None:
        spread = self._cluster.spread(self._cluster.bindings(gang.pods, spots))
        spread.add_to(self._kept)
        self._keepers.append((workload, spread))

    def _find_keeper(self, workload: Workload, gang: Gang) -> Behind | None:
        """Return whose room the pods would fit in, if there is one."""
        keepers = list(self._keepers)
        if self._barrier is not None and self._is_barred(workload):
            keepers.append(self._barrier)
        key = (gang.signature, len(keepers), len(self._assign))
        if key not in self._behind:
            self._behind[key] = self._look_for_keeper(gang, keepers)
        return self._behind[key]

    def _look_for_keeper(
        self, gang: Gang, keepers: Sequence[tuple[Workload, Spread]]
    ) -> Behind | None:
        room = self._cluster.free.copy()
        if not keepers or place(gang, room) is None:
            return None
        for keeper, spread in keepers:
            spread.take_from(room)
            if place(gang, room) is None:
                return Behind(keeper)
        return None

    def _describe_releasing(self, workload: Workload, spots: Sequence[int]) -> Releasing:
        preempted = tuple(w.key for w in self._releasing if w.preempted_by == workload.key)
        if preempted:
            return Releasing(preempted, is_preempted=True)
        names = {self._cluster.nodes[i].name for i in spots}
        ending = tuple(w.key for w in self._releasing if any(p.node in names for p in w.placed))
        return Releasing(ending or tuple(w.key for w in self._releasing), is_preempted=False)

    def _is_lasting(self, verdict: Verdict) -> bool:
        """Whether a workload would wait even if no other job ran, and all nodes were in use."""
        if isinstance(verdict, NoNode):
            groups: Sequence[Group] = (verdict.pods,)
        elif isinstance(verdict, NoRoom) and verdict.empty is not None:
            groups = verdict.gang.groups
        else:
            return False
        for group in groups:
            found = self._cluster.obstacles(group.rules, has_gpus=bool(group.amounts[GPUS] > 0))
            if (found[Obstacle.CORDON] | found[Obstacle.NOT_READY]).any():
                return False
        return True
