"""Plans the next cycle: looks at all runs and says which of them do what.

Each base model has a fair queue of its own, because its engine computes no other operations;
models with ready work take turns. A run is passed over while its state is in use, as by the commit
of its last cycle. A run that is not in the engine is to be restored first. Looking changes nothing
but credits, and wakes a run that waits for a slot; the cycle acts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tinsmith_runtime.fairness.deficit_round_robin import FairQueue
from tinsmith_trainer.cycle.in_flight import CyclesInFlight
from tinsmith_trainer.execution.slices import Part, Slice, backlog_of, cut, is_suspect, next_parts
from tinsmith_trainer.metrics import WAITING_RUNS
from tinsmith_trainer.residency.manager import Residency
from tinsmith_trainer.runs.run import LiveRun

_CYCLES_LOOKED_AT = 2
"""What is further behind in a queue does not come into the next cycle, and need not be counted."""


@dataclass(slots=True)
class CyclePlan:
    """What the cycle does next.

    Attributes:
        slices: What is computed together, of runs on one base model.
        aside: Slices that go on beside the cycles: saves, loads, and operations that are given up.
        to_restore: Runs that have work and are not in their engine.
    """

    slices: list[Slice] = field(default_factory=list)
    aside: list[Slice] = field(default_factory=list)
    to_restore: list[LiveRun] = field(default_factory=list)


class CyclePlanner:
    """Decides, cycle by cycle.

    Args:
        cycle_tokens: About how many tokens a cycle holds.
        max_attempts: Deaths of the process after which an operation is given up.
        residency: Knows whether a run waits for a slot.
    """

    def __init__(self, cycle_tokens: int, max_attempts: int, residency: Residency) -> None:
        self._cycle_tokens = cycle_tokens
        self._max_attempts = max_attempts
        self._residency = residency
        # In the order of cycles: the model that was served longest ago is first.
        self._queues: dict[str, FairQueue] = {}

    def take(
        self,
        runs: Iterable[LiveRun],
        in_flight: CyclesInFlight,
    ) -> CyclePlan:
        """Return what to do next; all of it is to be begun before the next call.

        Args:
            runs: All runs.
            in_flight: What is being computed. While anything is, and an operation that may have
                killed the process is next, nothing else is begun.
        """
        plan = CyclePlan()
        working: defaultdict[str, list[LiveRun]] = defaultdict(list)
        ready: defaultdict[str, list[LiveRun]] = defaultdict(list)
        num_placeless = num_held = 0
        waits_for_engine = False
        runs = [run for run in runs if run.queue and run.is_staying]
        crowded = in_flight.crowded_projects({run.project for run in runs})
        for run in runs:
            model = run.record.base_model
            working[model].append(run)
            if not run.is_ready or not run.lock.is_free:
                num_placeless += not run.state.is_resident
                num_held += not run.is_ready and not run.queue.running
            elif (
                run.queue[run.queue.next_sequence_number].record.num_attempts >= self._max_attempts
            ):
                plan.aside.append(Slice(run, [run.queue[run.queue.next_sequence_number]]))
            elif run.state.is_resident:
                if run.project in crowded:
                    continue
                ready[model].append(run)
                first = run.queue[run.queue.next_sequence_number]
                waits_for_engine |= bool(in_flight) and is_suspect(run, first)
            else:
                plan.to_restore.append(run)
        num_waiting = sum(map(len, ready.values()))
        # Nothing new is begun then until the engine is free.
        models = [] if waits_for_engine else self._models(ready)
        for model in models:
            slices = self._slices(model, working[model], ready[model])
            plan.aside += (each for each in slices if not each.is_computed)
            plan.slices = [each for each in slices if each.is_computed]
            num_waiting -= len(slices)
            if plan.slices:
                break
        WAITING_RUNS.labels("cycle").set(num_waiting)
        WAITING_RUNS.labels("slot").set(num_placeless + len(plan.to_restore))
        WAITING_RUNS.labels("number").set(num_held)
        return plan

    def _models(self, ready: Iterable[str]) -> list[str]:
        """Return the models with ready work, the one that waited longest first."""
        for model in ready:
            self._queues.setdefault(model, FairQueue(self._cycle_tokens))
        return [model for model in self._queues if model in set(ready)]

    def _slices(
        self, model: str, working: Sequence[LiveRun], ready: Sequence[LiveRun]
    ) -> list[Slice]:
        gives_way = self._residency.gives_way(ready)
        at_rest = {run.name: run for run in ready if run is not gives_way}
        parts: dict[str, list[Part]] = {}
        backlogs = []
        for run in working:
            found = next_parts(run, max_cost=_CYCLES_LOOKED_AT * self._cycle_tokens)
            if found:
                parts[run.name] = found
                backlogs.append(backlog_of(run, found, is_ready=run.name in at_rest))
        queue = self._queues.pop(model)
        self._queues[model] = queue
        share = queue.take(backlogs)
        return [
            cut(at_rest[name], parts[name], num_parts)
            for name, num_parts in share.num_parts.items()
        ]
