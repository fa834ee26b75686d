"""A run as the ledger knows it: where it goes on, and what was accepted and has no result yet."""

from __future__ import annotations

import logging
import time

from tinsmith_runtime.errors import DataLossError, StorageUnavailableError, TinsmithError
from tinsmith_runtime.ledger import Ledger, OperationOutcome, OperationRecord, RunRecord
from tinsmith_runtime.storage import ObjectStore
from tinsmith_trainer.runs.operations import ForwardWork, Kind, WireCodec, Work
from tinsmith_trainer.runs.request_payloads import read_payload
from tinsmith_trainer.runs.run_queue import OperationSize, QueuedOperation, RunQueue

logger = logging.getLogger(__name__)


class RunLoader:
    """Fills the queue of a run after a restart.

    Args:
        ledger: Operations and their results.
        store: Large requests.
        wire: The stored form of requests.
    """

    def __init__(self, ledger: Ledger, store: ObjectStore, wire: WireCodec) -> None:
        self._ledger = ledger
        self._store = store
        self._wire = wire

    async def load(self, run: RunRecord, fingerprint: str) -> RunQueue:
        """Return the queue of a run as the ledger has it.

        Args:
            run: The run.
            fingerprint: Of its engine, to be stored with an operation that is given up.

        Raises:
            StorageUnavailableError: If a large request cannot be read now; nothing was given up.
        """
        point = await self._ledger.resume_point(run.name)
        queue = RunQueue(
            next_sequence_number=point.next_sequence_number,
            latest_revision=point.latest_revision,
        )
        for refused in point.finished_ahead:
            queue.consume(refused)
        for pending in point.pending:
            try:
                payload = await read_payload(self._store, pending)
                work = self._wire.decode_work(Kind(pending.kind), payload)
            except StorageUnavailableError:
                # It was acknowledged: the start waits for the store, as it does for an OSError.
                raise
            except TinsmithError as error:
                for ended in await self._give_up(run, fingerprint, pending, error):
                    queue.consume(ended)
                continue
            queue.accept(QueuedOperation(pending, work, size_of(work, len(payload))))
        if queue:
            logger.info(
                "unfinished operations recovered",
                extra={"run": run.name, "num_operations": len(queue)},
            )
        return queue

    async def _give_up(
        self, run: RunRecord, fingerprint: str, record: OperationRecord, error: Exception
    ) -> list[OperationRecord]:
        """End an operation whose stored request is gone; one damaged file must not stop a pod."""
        logger.error(
            "stored request cannot be read",
            extra={
                "run": run.name,
                "sequence_number": record.sequence_number,
                "problem": str(error),
            },
        )
        damage = DataLossError(
            f"the stored request of operation {record.sequence_number} of {run.name} is damaged; "
            "send it again under a new number",
            run=run.name,
            sequence_number=record.sequence_number,
        )
        outcome = OperationOutcome(
            sequence_number=record.sequence_number,
            result=None,
            error=self._wire.encode_error(damage),
            version=run.version,
            plan=fingerprint,
            finish_time_s=time.time(),
        )
        return await self._ledger.finish(run.name, run.epoch, [outcome])


def size_of(work: Work, num_bytes: int) -> OperationSize:
    """Return what an operation takes of the limits of a queue."""
    if not isinstance(work, ForwardWork):
        return OperationSize(0, num_bytes)
    return OperationSize(work.num_tokens, num_bytes, work.num_tokens if work.is_backward else 0)
