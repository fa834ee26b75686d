"""One round of a pass: every workload is asked once, in order."""

from __future__ import annotations

import datetime
from collections.abc import Hashable, Sequence

import numpy as np

from tinsmith_controller.assignment import backfill, preemption
from tinsmith_controller.assignment.cluster import GPUS, Cluster, Room, Spread, seconds
from tinsmith_controller.assignment.gangs import Gang, place, place_soonest, prepare
from tinsmith_controller.assignment.ordering import Order
from tinsmith_controller.assignment.quotas import Quotas
from tinsmith_controller.assignment.reasons import (
    Behind,
    Leaving,
    NoRoom,
    UnknownQueue,
    Verdict,
    explain,
)
from tinsmith_controller.assignment.records import (
    Decisions,
    Key,
    Node,
    Placement,
    PodRequest,
    Policy,
    Stage,
    Workload,
)


class Round:
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
        policy: Policy,
        now: datetime.datetime,
    ) -> None:
        self._policy = policy
        self._now = now
        self._cluster = Cluster(nodes, workloads, now)
        self._quotas = Quotas(policy, workloads)
        self._order = Order(workloads, policy)
        self._leaving = [w for w in workloads if w.stage is Stage.LEAVING]
        self._victims = [w for w in workloads if preemption.may_be_preempted(w, now)]
        self._kept: Room = np.zeros_like(self._cluster.free)
        self._keepers: list[tuple[Workload, Spread]] = []
        self._has_reserved = False
        # Room only shrinks in a round, so what did not fit does not fit later.
        self._unfit: set[Hashable] = set()
        self._unhelped: set[Hashable] = set()
        self._assign: dict[Key, tuple[Placement, ...]] = {}
        self._preempt: dict[Key, Key] = {}
        self._verdicts: dict[Key, tuple[Workload, Verdict]] = {}

    def run(self) -> Decisions:
        """Return what the round decides."""
        while (workload := self._order.next()) is not None:
            if workload.key in self._preempt:
                continue
            parts = [workload.pods] if workload.is_gang else [(pod,) for pod in workload.pods]
            for pods in parts:
                verdict = self._ask(workload, pods)
                if verdict is not None:
                    self._verdicts.setdefault(workload.key, (workload, verdict))
        waiting = {
            key: explain(workload, verdict, self._cluster)
            for key, (workload, verdict) in self._verdicts.items()
        }
        return Decisions(self._assign, self._preempt, waiting)

    def _ask(self, workload: Workload, pods: Sequence[PodRequest]) -> Verdict | None:
        """Place the pods, all or none, or say why not."""
        if not self._quotas.has_queue(workload):
            return UnknownQueue(tuple(sorted(self._policy.queues)))
        gang = prepare(self._cluster, workload, pods)
        num_gpus = sum(pod.resources.gpus for pod in pods)
        excess = self._quotas.excess(workload, num_gpus)
        if excess is None and self._place(workload, gang, num_gpus):
            return None
        if excess is not None and excess.is_own:
            return excess
        empty = self._cluster.drained(workload)
        if place(gang, empty) is None:
            return NoRoom(gang, empty)
        leaving = self._await(workload, gang, num_gpus)
        if leaving is not None:
            return leaving
        if backfill.is_overdue(workload, self._policy, self._now):
            if excess is not None:
                self._quotas.keep(workload, num_gpus)
            elif not self._has_reserved:
                self._reserve(workload, gang)
        return excess or self._find_keeper(gang) or NoRoom(gang, None)

    def _place(self, workload: Workload, gang: Gang, num_gpus: int) -> bool:
        if gang.signature in self._unfit:
            return False
        spots = place(gang, self._cluster.free - self._kept)
        if spots is None:
            self._unfit.add(gang.signature)
            return False
        placements = self._cluster.placements(gang.pods, spots)
        self._cluster.assign(workload, placements)
        self._quotas.take(workload, num_gpus)
        self._order.gave(workload, num_gpus)
        self._assign[workload.key] = self._assign.get(workload.key, ()) + placements
        return True

    def _await(self, workload: Workload, gang: Gang, num_gpus: int) -> Leaving | None:
        """Keep what others are leaving, and ask more to leave if that is not enough."""
        soon = self._cluster.free + self._cluster.leaving - self._kept
        excess = self._quotas.excess(workload, num_gpus, without=self._leaving)
        if self._leaving and excess is None:
            spots = place(gang, soon)
            if spots is not None:
                self._keep(workload, gang, spots)
                return self._describe_leaving(workload, spots)
        victims = self._choose_victims(workload, gang, num_gpus, soon)
        if not victims:
            return None
        for victim in victims:
            self._cluster.release(victim)
            self._cluster.spread(victim.placed).add_to(soon)
            self._preempt[victim.key] = workload.key
        self._victims = [other for other in self._victims if other.key not in self._preempt]
        self._leaving += victims
        spots = place(gang, soon)
        if spots is not None:
            self._keep(workload, gang, spots)
        return Leaving(tuple(victim.key for victim in victims), is_preempted=True)

    def _choose_victims(
        self, workload: Workload, gang: Gang, num_gpus: int, soon: Room
    ) -> tuple[Workload, ...]:
        lower = [
            victim
            for victim in self._victims
            if victim.priority < workload.priority and victim.key not in self._assign
        ]
        if not lower or (gang.signature, workload.priority) in self._unhelped:
            return ()
        spreads = {victim.key: self._cluster.spread(victim.placed) for victim in lower}

        def room_without(victims: Sequence[Workload]) -> Room:
            room = soon.copy()
            for victim in victims:
                spreads[victim.key].add_to(room)
            return room

        if place(gang, room_without(lower)) is None:
            self._unhelped.add((gang.signature, workload.priority))
            return ()

        def suffices(victims: Sequence[Workload]) -> bool:
            gone = [*self._leaving, *victims]
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
        since_s = seconds(workload.queued) + self._policy.backfill_patience_s
        spots = backfill.reserve(self._cluster, gang, workload, self._kept, since_s)
        if spots is not None:
            self._keep(workload, gang, spots)
            self._has_reserved = True

    def _keep(self, workload: Workload, gang: Gang, spots: Sequence[int]) -> None:
        spread = self._cluster.spread(self._cluster.placements(gang.pods, spots))
        spread.add_to(self._kept)
        self._keepers.append((workload, spread))

    def _find_keeper(self, gang: Gang) -> Behind | None:
        """Return whose room the pods would fit in, if there is one."""
        room = self._cluster.free.copy()
        if not self._keepers or place(gang, room) is None:
            return None
        for keeper, spread in self._keepers:
            spread.take_from(room)
            if place(gang, room) is None:
                return Behind(keeper)
        return None

    def _describe_leaving(self, workload: Workload, spots: Sequence[int]) -> Leaving:
        preempted = tuple(w.key for w in self._leaving if w.leaving_for == workload.key)
        if preempted:
            return Leaving(preempted, is_preempted=True)
        names = {self._cluster.nodes[i].name for i in spots}
        ending = tuple(w.key for w in self._leaving if any(p.node in names for p in w.placed))
        return Leaving(ending or tuple(w.key for w in self._leaving), is_preempted=False)
