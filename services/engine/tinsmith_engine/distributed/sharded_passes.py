"""Packed passes on several ranks: every rank plans all of them and computes its share.

All ranks hold the same batches and make the same plan (`microbatch_assignment.py`), so that nothing
but numbers is exchanged. A round is one pass on each rank, perhaps an empty one: if the base model
is sharded, every rank takes part in every gathering of weights, whether it has work or not. After
the rounds the ranks tell each other what they found, and then each of them ends the microbatches of
all; gradients are added once an operation has all of its microbatches.

If a pass fails on one rank, that rank still takes part in the gatherings, and reports the
failure at the end of the rounds. It is then the failure of the pass on all ranks, and all go on
alike: they
undo, compute one by one, split further, as `pass_runner` does.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tinsmith_engine.base.engine_thread import Parts
from tinsmith_engine.base.memory import is_out_of_memory
from tinsmith_engine.base.types import BatchRequest, BatchResult
from tinsmith_engine.distributed.microbatch_assignment import (
    Loads,
    RankAssignment,
    share_rows,
    sum_partials_,
)
from tinsmith_engine.distributed.process_group import Ranks
from tinsmith_engine.distributed.serialization import decode, encode
from tinsmith_engine.distributed.sharded_base import GatherStream
from tinsmith_engine.model.model_protocol import Model
from tinsmith_engine.runs.run_store import Run
from tinsmith_engine.training.batch_execution import BatchExecution
from tinsmith_engine.training.pass_runner import PassRunner, Segment
from tinsmith_runtime.errors import TinsmithError

logger = logging.getLogger(__name__)


class ShardedPassRunner(PassRunner):
    """Runs batch requests through a model, together with the other ranks.

    Args:
        model: The model.
        ranks: All ranks.
        stream: Gathers the weights of a sharded base model; None if each rank has all of it.
        copies_on_bind: See `PassRunner`.
        micro_batch_tokens: See `PassRunner`.
        max_pass_tokens: See `PassRunner`.
    """

    def __init__(
        self,
        model: Model[Any],
        ranks: Ranks,
        stream: GatherStream | None,
        *,
        copies_on_bind: bool,
        micro_batch_tokens: int,
        max_pass_tokens: int,
    ) -> None:
        super().__init__(
            model,
            ranks.device,
            copies_on_bind=copies_on_bind,
            micro_batch_tokens=micro_batch_tokens,
            max_pass_tokens=max_pass_tokens,
        )
        self._ranks = ranks
        self._stream = stream
        self._loads = Loads(ranks.world_size)
        self._assignments: dict[int, RankAssignment] = {}

    def run(
        self, requests: Sequence[tuple[BatchRequest, Run | None]]
    ) -> Parts[list[BatchResult | TinsmithError]]:
        """Compute valid requests; every rank is given the same ones."""
        self._loads.clear()
        self._assignments.clear()
        return (yield from super().run(requests))

    def _begin_backward(self, execution: BatchExecution) -> None:
        execution.starts_fresh = False
        execution.begin()
        assignment = self._loads.assign(
            [execution.rows_of(microbatch) for microbatch in execution.microbatches]
        )
        self._assignments[id(execution)] = assignment
        execution.starts_fresh = self._ranks.rank != assignment.first_rank
        self._clear_gradient(execution)

    def _next_microbatches(self, execution: BatchExecution) -> list[list[int]]:
        return execution.microbatches[: self._ranks.world_size]

    def _run_segments(
        self, segments: Sequence[Segment], rows_left: int, *, needs_gradient: bool
    ) -> Parts[None]:
        yield self._seconds(rows_left, needs_gradient=needs_gradient)
        places = self._places(segments, needs_gradient=needs_gradient)
        by_rank = self._by_rank(segments, places)
        # The ranks part alike: no clock decides.
        passes = [self._passes(members, self._max_pass_tokens) for members in by_rank]
        mine = passes[self._ranks.rank]
        failure: Exception | None = None
        for number in range(max(len(one) for one in passes)):
            part = mine[number] if number < len(mine) and failure is None else None
            failure = self._take_part(part, needs_gradient=needs_gradient) or failure
        self._tell(by_rank, failure)
        if needs_gradient:
            self._add_gradients({id(execution): execution for execution, _ in segments}.values())
        for execution, _ in segments:
            execution.end_microbatch()

    def _places(self, segments: Sequence[Segment], *, needs_gradient: bool) -> list[int]:
        """Return the rank that computes each segment."""
        if not needs_gradient:
            return [
                self._loads.place_one(execution.rows_of(microbatch))
                for execution, microbatch in segments
            ]
        seen: Counter[int] = Counter()
        places = []
        for execution, _ in segments:
            places.append(self._assignments[id(execution)].rank_of(seen[id(execution)]))
            seen[id(execution)] += 1
        return places

    def _take_part(
        self, part: Sequence[Segment] | None, *, needs_gradient: bool
    ) -> Exception | None:
        """Compute a pass, or only help the others to theirs; return what went wrong."""
        if self._stream is not None:
            self._stream.begin(needs_gradient=needs_gradient)
        failure = None
        if part is not None:
            failure = _caught(lambda: self._run_pass(part, needs_gradient=needs_gradient))
        if self._stream is not None:
            self._stream.finish()
        return failure

    def _by_rank(self, segments: Sequence[Segment], places: Sequence[int]) -> list[list[Segment]]:
        found: list[list[Segment]] = [[] for _ in range(self._ranks.world_size)]
        for segment, place in zip(segments, places, strict=True):
            found[place].append(segment)
        return found

    def _tell(self, by_rank: Sequence[Sequence[Segment]], failure: Exception | None) -> None:
        """Exchange what was found; raise on all ranks if one of them failed."""
        mine: object
        if failure is None:
            mine = [
                execution.found(microbatch) for execution, microbatch in by_rank[self._ranks.rank]
            ]
        else:
            kind = "memory" if is_out_of_memory(failure) else "fault"
            mine = {kind: f"{type(failure).__name__}: {failure}"}
        found = [decode(message) for message in self._ranks.all_gather(encode(mine), "pass")]
        failures = {rank: one for rank, one in enumerate(found) if isinstance(one, dict)}
        for rank, one in failures.items():
            if "memory" in one:
                raise MemoryError(f"out of memory on rank {rank}: {one['memory']}")
        for rank, one in failures.items():
            raise RuntimeError(f"a pass failed on rank {rank}: {one['fault']}")
        for rank, members in enumerate(by_rank):
            if rank != self._ranks.rank:
                for (execution, microbatch), results in zip(members, found[rank], strict=True):
                    execution.take_found(microbatch, results)

    def _add_gradients(self, executions: Iterable[BatchExecution]) -> None:
        """Give all ranks the gradients of operations whose last microbatches were computed."""
        ended = [
            (execution.run.slot.grad_P, self._assignments[id(execution)])
            for execution in executions
            if execution.run is not None and len(execution.microbatches) <= self._ranks.world_size
        ]
        share_rows(
            self._ranks,
            [(flat_P, one.first_rank) for flat_P, one in ended if one.num_partials == 1],
        )
        for flat_P, one in ended:
            if one.num_partials > 1:
                sum_partials_(self._ranks, flat_P, one.owners)


def _caught(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as error:
        if not is_out_of_memory(error):
            logger.exception("a pass failed on this rank")
        # Its frames would keep the tensors of the pass alive.
        return error.with_traceback(None)
    return None
