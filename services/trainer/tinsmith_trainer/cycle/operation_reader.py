"""What clients ask of operations: how one stands, and to be told when it is done."""

from __future__ import annotations

import time

from tinsmith_runtime.errors import OperationExpiredError, OperationNotFoundError
from tinsmith_runtime.ledger import Ledger, OperationRecord, OperationState
from tinsmith_trainer.ownership.result_retention import Retrievals
from tinsmith_trainer.runs.operations import Submission
from tinsmith_trainer.runs.run import LiveRun

_WAIT_PAGE = 100
_WAIT_PAGE_BYTES = 8 * 2**20


class OperationReader:
    """Reads operations, from memory where they are there, else from the ledger.

    Args:
        ledger: Has all of them.
        retrievals: Told which results go to clients.
    """

    def __init__(self, ledger: Ledger, retrievals: Retrievals) -> None:
        self._ledger = ledger
        self._retrievals = retrievals

    async def operation(self, run: LiveRun, sequence_number: int) -> OperationRecord:
        """Return an operation as it stands.

        Raises:
            OperationNotFoundError: If the run has none of this number.
            OperationExpiredError: If it ended so long ago that its result is not kept.
        """
        queued = run.queue.get(sequence_number)
        if queued is not None:
            return queued.record
        record = await self._ledger.get_operation(run.name, sequence_number)
        if record is None:
            if 1 <= sequence_number <= await self._ledger.expired_through(run.name):
                raise operation_expired(run.name, sequence_number)
            raise OperationNotFoundError(
                f"{run.name} has no operation {sequence_number}; it was not accepted",
                run=run.name,
                sequence_number=sequence_number,
            )
        if record.is_expired:
            raise operation_expired(run.name, sequence_number)
        self._note_delivered(run, [record])
        return record

    async def find(self, submission: Submission) -> OperationRecord | None:
        """Return the operation that the same request made before, if it was accepted."""
        record = await self._ledger.get_operation(submission.run, submission.sequence_number)
        is_same = (
            record is not None
            and record.request_id == submission.request_id
            and record.digest == submission.digest
            and (record.state is not OperationState.FAILED or record.num_attempts > 0)
        )
        return record if is_same else None

    async def list_operations(
        self, run: LiveRun, first: int, *, limit: int
    ) -> tuple[list[OperationRecord], int | None]:
        """Return operations with at least this number, in order, and the number of the next.

        Those that expired are left out.
        """
        records = await self._ledger.operations_from(run.name, first, limit=limit + 1)
        page = _first_page(records[:limit])
        has_more = len(records) > len(page)
        kept = [record for record in page if not record.is_expired]
        self._note_delivered(run, kept)
        return kept, records[len(page)].sequence_number if has_more else None

    def _note_delivered(self, run: LiveRun, records: list[OperationRecord]) -> None:
        self._retrievals.note(records)
        run.queue.note_delivered(records)

    async def wait_operation(
        self, run: LiveRun, sequence_number: int, timeout_s: float
    ) -> OperationRecord:
        """Return an operation once it finished, or as it stands when the time is over."""
        deadline_s = time.monotonic() + timeout_s
        record = await self.operation(run, sequence_number)
        while record.state is OperationState.PENDING and not _has_ended(run):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            await run.queue.wait_for_change(left_s)
            if sequence_number not in run.queue:
                record = await self.operation(run, sequence_number)
        return record

    async def wait_operations(
        self, run: LiveRun, after_revision: int, timeout_s: float
    ) -> list[OperationRecord]:
        """Return what finished after a revision, waiting until there is something."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            records = run.queue.recent_after(after_revision)
            if records is None and after_revision < run.queue.latest_revision:
                records = await self._ledger.finished_after(
                    run.name, after_revision, limit=_WAIT_PAGE, limit_bytes=_WAIT_PAGE_BYTES
                )
            left_s = deadline_s - time.monotonic()
            if records or left_s <= 0 or _has_ended(run):
                page = _first_page(records or [])
                self._note_delivered(run, page)
                return page
            await run.queue.wait_for_change(left_s)


def operation_expired(run: str, sequence_number: int) -> OperationExpiredError:
    """Return the error for an operation whose result is not kept any more."""
    return OperationExpiredError(
        f"the result of operation {sequence_number} of {run} has expired; it was executed and is "
        "not to be sent again",
        run=run,
        sequence_number=sequence_number,
    )


def _has_ended(run: LiveRun) -> bool:
    """Whether nothing more is to be heard of a run here."""
    return not run.is_staying


def _first_page(records: list[OperationRecord]) -> list[OperationRecord]:
    """Return the beginning of a list that fits into one answer, at least one entry."""
    size_bytes = 0
    for index, record in enumerate(records[:_WAIT_PAGE]):
        size_bytes += len(record.result or record.error or b"")
        if index and size_bytes > _WAIT_PAGE_BYTES:
            return records[:index]
    return records[:_WAIT_PAGE]
