"""Computes again what was acknowledged after a snapshot, and compares.

Operations of the ledger are replayed in order, each under the plan that was recorded with it. What
failed then is not computed: its row says what it meant for the accumulation. A result that differs
from the acknowledged one is recorded on the run, never hidden.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging

from tinsmith_engine import Engine, Parts, timed
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import DataLossError, TinsmithError, UnknownLossError
from tinsmith_runtime.ledger import Ledger, OperationRecord, OperationState, records
from tinsmith_runtime.storage import ObjectStore, checkpoint_manifests
from tinsmith_trainer.execution import snapshot_format
from tinsmith_trainer.execution.engine_calls import Answer, Steps, apply_steps, request_of
from tinsmith_trainer.execution.numerics_plan import parse_plan
from tinsmith_trainer.execution.run_health import RUN_HEALTH
from tinsmith_trainer.metrics import REPLAYED_OPERATIONS
from tinsmith_trainer.runs.accumulation import Accumulation
from tinsmith_trainer.runs.operations import ForwardWork, Kind, OptimStepWork, WireCodec, Work
from tinsmith_trainer.runs.request_payloads import read_payload
from tinsmith_trainer.runs.run import LiveRun

logger = logging.getLogger(__name__)

_PAGE = 100


class Replayer:
    """Brings the engine's state of a run from a snapshot to what the ledger says.

    One operation at a time, so that the cycles of other runs come in between.

    Args:
        host: The engines.
        ledger: Operations, and which of them have results.
        store: Files of checkpoints and large payloads.
        wire: The stored form of requests and results.
    """

    def __init__(
        self, host: EngineHost, ledger: Ledger, store: ObjectStore, wire: WireCodec
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._store = store
        self._wire = wire

    async def replay(self, run: LiveRun) -> None:
        """Compute what has a result and is above `run.state.sequence_number`.

        Raises:
            DataLossError: If the ledger or a checkpoint lacks what is needed.
        """
        while run.state.sequence_number + 1 < run.queue.next_sequence_number:
            page = await self._ledger.operations_from(
                run.name, run.state.sequence_number + 1, limit=_PAGE
            )
            finished = [r for r in page if r.sequence_number < run.queue.next_sequence_number]
            is_next = finished and finished[0].sequence_number == run.state.sequence_number + 1
            if not is_next:
                raise DataLossError(
                    f"operation {run.state.sequence_number + 1} of {run.name} is not in the "
                    "ledger, and no snapshot that contains it can be read; restore the ledger or "
                    "the snapshots from a backup",
                    run=run.name,
                )
            for record in finished:
                await self._replay_one(run, record)
                run.state.replay(record.sequence_number)

    async def _replay_one(self, run: LiveRun, record: OperationRecord) -> None:
        is_success = record.state is OperationState.SUCCEEDED
        match record.kind:
            case Kind.FORWARD_BACKWARD | Kind.OPTIM_STEP if is_success:
                await self._compute_again(run, record)
            case Kind.FORWARD_BACKWARD | records.GIVEN_UP_KIND:
                run.queue.add_failure(record.sequence_number)
                if record.retrieve_time_s is not None:
                    run.queue.note_delivered([record])
            case Kind.OPTIM_STEP if record.plan is not None:
                await self._host.call(run.engine.clear_gradient, run.name)
                run.queue.set_accumulation(Accumulation())
            case Kind.LOAD_CHECKPOINT if is_success:
                # The snapshot taken with the load is gone or damaged.
                await self._load_again(run, record)
            case _:
                # A refused call changed nothing, nor did a forward or a save.
                pass

    async def _compute_again(self, run: LiveRun, record: OperationRecord) -> None:
        failpoints.passing("trainer.replay")
        payload = await read_payload(self._store, record)
        kind = Kind(record.kind)
        work = self._wire.decode_work(kind, payload)
        answer, busy_s = await self._host.call_by_part(
            timed(_compute(run.engine, run.name, work, record.plan or ""))
        )
        failpoints.passing("trainer.replayed")
        run.state.add_replay_cost(busy_s)
        if kind is Kind.OPTIM_STEP:
            run.queue.set_accumulation(Accumulation())
        else:
            run.queue.set_accumulation(run.queue.accumulation.add_part(record.seen_through))
        if isinstance(answer, UnknownLossError):
            raise DataLossError(
                f"{run.name} cannot be restored: operation {record.sequence_number} has a loss "
                f"that this release does not know ({answer.message}); run the release that "
                "recorded it, and save a checkpoint there",
                run=run.name,
            )
        is_equal = not isinstance(answer, TinsmithError) and _digest(
            self._wire.encode_result(kind, answer)
        ) == _digest_of(record)
        REPLAYED_OPERATIONS.labels("equal" if is_equal else "diverged").inc()
        if not is_equal:
            logger.error(
                "replay gave other bits than the first execution",
                extra={"run": run.name, "sequence_number": record.sequence_number},
            )
            await self._ledger.mark_diverged(run.name, run.record.epoch)
            run.note_divergence()
            RUN_HEALTH.note_divergence(run.name)

    async def _load_again(self, run: LiveRun, record: OperationRecord) -> None:
        work = self._wire.decode_work(Kind.LOAD_CHECKPOINT, await read_payload(self._store, record))
        checkpoint = await self._ledger.get_checkpoint(getattr(work, "checkpoint", ""))
        if checkpoint is None:
            raise DataLossError(
                f"{run.name} cannot be restored: the snapshot of operation "
                f"{record.sequence_number} is damaged and the checkpoint it loaded is deleted",
                run=run.name,
            )
        manifest, files = await asyncio.to_thread(
            checkpoint_manifests.read_checkpoint,
            self._store,
            checkpoint.folder,
            sha256=checkpoint.sha256,
        )
        await self._host.call(
            snapshot_format.apply_checkpoint,
            run.engine,
            run.name,
            files,
            manifest.attributes,
            include_optimizer=getattr(work, "include_optimizer", False),
        )
        run.queue.set_accumulation(Accumulation())


def _digest(result: bytes) -> bytes:
    return hashlib.sha256(result).digest()


def _digest_of(record: OperationRecord) -> bytes | None:
    """Return the digest of an acknowledged result, which itself may have expired."""
    return record.result_digest if record.result is None else _digest(record.result)


def _compute(engine: Engine, run: str, work: Work, plan: str) -> Parts[Answer]:
    """Compute one operation that succeeded before; other runs are computed between its passes."""
    match work:
        case ForwardWork():
            split = parse_plan(plan).micro_batch_tokens
            request = request_of(run, work, micro_batch_tokens=split)
            [answer] = yield from engine.compute_by_pass([request])
            return answer
        case OptimStepWork():
            # It succeeded, so its sender knew of every failure before it.
            steps = Steps()
            steps.add(run, work, Accumulation(), 0)
            return apply_steps(engine, steps)[run]
        case _:
            raise TypeError(f"{type(work).__name__} is not computed on the engine")
