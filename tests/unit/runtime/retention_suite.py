"""What every ledger promises of snapshots, and of what is dropped in time."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib

import pytest
from tests.unit.runtime.ledger_suite import (
    OTHER,
    RUN,
    cutoffs,
    operation,
    outcome,
    run_record,
    snapshot,
)

from tinsmith_runtime.errors import SequenceNumberReusedError
from tinsmith_runtime.ledger import Cutoffs, Ledger, OperationState
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.records import HISTORY_RETENTION_S


class RetentionSuite:
    """For a class that is a `LedgerSuite` too, which has the fixtures."""

    # Snapshots.

    async def test_snapshots_are_newest_first_and_go_when_nothing_needs_them(
        self, ledger: Ledger
    ) -> None:
        await ledger.adopt_run(run_record(OTHER))
        for number in (3, 1, 2):
            await ledger.add_snapshot(snapshot(number), 1)
        await ledger.add_snapshot(snapshot(1, OTHER), 1)
        await ledger.add_snapshot(snapshot(3, sha256="cd"), 1)
        assert await ledger.list_snapshots(RUN) == [
            snapshot(3, sha256="cd"),
            snapshot(2),
            snapshot(1),
        ]
        assert await ledger.thin_snapshots(RUN, now_s=8.0, num_history=4) == []
        removed = await ledger.thin_snapshots(RUN, now_s=30 * 3600.0, num_history=4)
        assert [record.sequence_number for record in removed] == [1]
        assert await ledger.list_snapshots(RUN) == [snapshot(3, sha256="cd"), snapshot(2)]
        assert await ledger.list_snapshots(OTHER) == [snapshot(1, OTHER)]

    async def test_snapshots_go_with_the_requests_before_the_past_that_is_kept(
        self, ledger: Ledger
    ) -> None:
        for number in range(1, 6):
            await ledger.submit(operation(number))
        await ledger.finish(RUN, 1, [outcome(n, finish_time_s=10.0 * n) for n in range(1, 6)])
        for number in range(1, 6):
            await ledger.add_snapshot(snapshot(number, create_time_s=10.0 * number + 1), 1)
        # The first operation ended before, but what came after it is computed from it.
        assert not await ledger.has_expirable(RUN, cutoffs(request_s=10.5))
        assert (await ledger.expire(RUN, 1, cutoffs(request_s=20.0))).num_payloads == 1
        dropped = await ledger.expire(RUN, 1, cutoffs(request_s=35.0))
        assert dropped.num_payloads == 2
        assert sorted(each.sequence_number for each in dropped.snapshots) == [1, 2]
        assert not await ledger.has_expirable(RUN, cutoffs(request_s=35.0))
        assert [each.sequence_number for each in await ledger.list_snapshots(RUN)] == [5, 4, 3]

    # Retention.

    async def test_results_are_dropped_by_age_and_leave_their_digest(self, ledger: Ledger) -> None:
        for number in range(1, 6):
            await ledger.submit(operation(number))
        await ledger.finish(
            RUN,
            1,
            [
                outcome(1, finish_time_s=100.0),
                outcome(2, finish_time_s=100.0),
                outcome(3, finish_time_s=300.0, result=None),
                outcome(4, finish_time_s=100.0, result=None),
            ],
        )
        await ledger.note_retrieved(RUN, 1, {1: 200.0, 3: 200.0, 5: 200.0})
        await ledger.note_retrieved(RUN, 1, {1: 900.0})  # an earlier note stays

        async def expired(cutoffs: Cutoffs) -> list[int]:
            assert await ledger.has_expirable(RUN, cutoffs)
            assert not (await ledger.expire(RUN, 1, cutoffs)).is_empty
            assert (await ledger.expire(RUN, 1, cutoffs)).is_empty
            found = await ledger.operations_from(RUN, 1)
            return [record.sequence_number for record in found if record.is_expired]

        assert not await ledger.has_expirable(RUN, cutoffs(retrieved_s=200.0, unretrieved_s=100.0))
        assert await expired(cutoffs(unretrieved_s=101.0)) == [2, 4]
        assert await expired(cutoffs(retrieved_s=201.0)) == [1, 2, 3, 4]
        first, _, third, _, waiting = await ledger.operations_from(RUN, 1)
        assert (first.state, first.result) == (OperationState.SUCCEEDED, None)
        assert first.result_digest == hashlib.sha256(b"result").digest()
        assert (third.state, third.error, third.result_digest) == ("failed", None, None)
        assert (waiting.state, waiting.retrieve_time_s) == (OperationState.PENDING, None)
        # The requests are there: no snapshot contains them.
        assert first.payload == b"payload"
        assert await ledger.finished_after(RUN, 0, limit=10, limit_bytes=1000) == []
        again = await ledger.submit(operation(1))
        assert (again.sequence_number, again.is_expired) == (1, True)
        assert (await ledger.resume_point(RUN)).next_sequence_number == 5

    async def test_requests_are_dropped_once_two_snapshots_contain_them(
        self, ledger: Ledger
    ) -> None:
        for number in range(1, 5):
            path = f"{RUN}/payloads/{number}"
            await ledger.submit(operation(number, payload=None, payload_path=path))
        await ledger.finish(RUN, 1, [outcome(number) for number in (1, 2, 3)])
        await ledger.add_snapshot(snapshot(2), 1)
        nothing = cutoffs(request_s=10.0)
        assert not await ledger.has_expirable(RUN, nothing)
        await ledger.add_snapshot(snapshot(3), 1)
        assert not await ledger.has_expirable(RUN, cutoffs(request_s=6.0))
        assert (await ledger.expire(RUN, 1, nothing)).num_payloads == 2
        assert (await ledger.expire(RUN, 1, nothing)).is_empty
        paths = [record.payload_path for record in await ledger.operations_from(RUN, 1)]
        kept = [f"{RUN}/payloads/{number}" for number in (3, 4)]
        assert paths == [None, None, *kept]
        wanted = [f"{RUN}/payloads/{number}" for number in range(1, 6)]
        assert await ledger.named_payloads(RUN, 1, wanted) == set(kept)
        assert await ledger.expired_through(RUN) == 0

    async def test_a_run_that_says_so_keeps_its_past_and_its_results_for_longer(
        self, ledger: Ledger
    ) -> None:
        await ledger.adopt_run(run_record(OTHER, history_retention_s=2 * HISTORY_RETENTION_S))
        for run in (RUN, OTHER):
            for number in range(1, 5):
                await ledger.submit(operation(number, run=run))
            await ledger.finish(run, 1, [outcome(number) for number in range(1, 5)])
            for number in range(1, 5):
                await ledger.add_snapshot(snapshot(number, run), 1)
        old = cutoffs(request_s=10.0, retrieved_s=10.0, unretrieved_s=10.0)
        assert not await ledger.has_expirable(OTHER, old)
        assert (await ledger.expire(OTHER, 1, old)).is_empty
        assert (await ledger.expire(RUN, 1, old)).num_payloads == 3
        [kept] = [run for run in await ledger.list_runs() if run.name == OTHER]
        assert kept.history_retention_s == 2 * HISTORY_RETENTION_S
        # A trainer that takes it over changes nothing of that.
        await ledger.adopt_run(run_record(OTHER, epoch=2))
        assert not await ledger.has_expirable(OTHER, old)
        late = dataclasses.replace(old, now_s=old.now_s + HISTORY_RETENTION_S)
        assert await ledger.has_expirable(OTHER, late)
        with pytest.raises(FencedError):
            await ledger.set_history(OTHER, 1, 3 * HISTORY_RETENTION_S)
        await ledger.set_history(OTHER, 2, 3 * HISTORY_RETENTION_S)
        assert (await ledger.expire(OTHER, 2, late)).is_empty
        await ledger.set_history(OTHER, 2, HISTORY_RETENTION_S)
        dropped = await ledger.expire(OTHER, 2, old)
        assert (dropped.num_results, dropped.num_payloads) == (4, 3)
        assert sorted(each.sequence_number for each in dropped.snapshots) == [1, 2]

    async def test_rows_go_from_the_lowest_on_and_their_numbers_are_never_free_again(
        self, ledger: Ledger
    ) -> None:
        for number in range(1, 7):
            await ledger.submit(operation(number))
        times_s = (100.0, 100.0, 500.0, 100.0, 100.0)
        await ledger.finish(
            RUN, 1, [outcome(n, finish_time_s=time_s) for n, time_s in enumerate(times_s, 1)]
        )
        for number in (4, 5):
            await ledger.add_snapshot(snapshot(number), 1)
        dropped = await ledger.expire(RUN, 1, cutoffs(unretrieved_s=200.0, request_s=100.0))
        assert (dropped.num_results, dropped.num_payloads, dropped.num_rows) == (4, 0, 0)
        # The third has its result, so that it and what is above it stay.
        dropped = await ledger.expire(RUN, 1, cutoffs(request_s=900.0))
        assert (dropped.num_payloads, dropped.num_rows) == (4, 2)
        assert await ledger.expired_through(RUN) == 2
        assert [r.sequence_number for r in await ledger.operations_from(RUN, 1)] == [3, 4, 5, 6]
        assert await ledger.get_operation(RUN, 2) is None
        for request_id in ("id-2", "another"):
            with pytest.raises(SequenceNumberReusedError, match="expired"):
                await ledger.submit(operation(2, request_id))
        assert await ledger.refuse(operation(2, "another"), b"why") is None
        assert await ledger.give_up(RUN, 1, [2], b"gap") == []
        # The fifth is above the oldest snapshot: a replay may need it.
        everything = cutoffs(unretrieved_s=900.0, request_s=900.0)
        assert (await ledger.expire(RUN, 1, everything)).num_rows == 2
        assert (await ledger.expire(RUN, 1, everything)).is_empty
        assert [r.sequence_number for r in await ledger.operations_from(RUN, 1)] == [5, 6]
        point = await ledger.resume_point(RUN)
        assert (point.next_sequence_number, point.latest_revision) == (6, 5)
        assert [record.sequence_number for record in point.pending] == [6]
        await ledger.adopt_run(run_record(epoch=2))
        assert await ledger.expired_through(RUN) == 4

    async def test_the_row_that_made_the_version_at_which_the_past_begins_stays(
        self, ledger: Ledger
    ) -> None:
        kinds = ("forward_backward", "optim_step", "save_checkpoint", "optim_step", "forward")
        for number, kind in enumerate(kinds, 1):
            await ledger.submit(operation(number, kind=kind))
        await ledger.finish(RUN, 1, [outcome(number) for number in range(1, 6)])
        for number in (3, 5):
            await ledger.add_snapshot(snapshot(number), 1)
        old = dataclasses.replace(
            cutoffs(unretrieved_s=10.0, request_s=10.0), boundary_kinds=frozenset({"optim_step"})
        )
        dropped = await ledger.expire(RUN, 1, old)
        assert (dropped.num_payloads, dropped.num_rows) == (3, 1)
        assert not await ledger.has_expirable(RUN, old)
        await ledger.add_snapshot(snapshot(6), 1)
        dropped = await ledger.expire(RUN, 1, old)
        assert (dropped.num_payloads, dropped.num_rows) == (2, 2)
        assert [r.sequence_number for r in await ledger.operations_from(RUN, 1)] == [4, 5]

    async def test_a_number_is_not_free_at_the_moment_when_its_row_goes(
        self, ledger: Ledger
    ) -> None:
        numbers = range(1, 31)
        await asyncio.gather(*(ledger.submit(operation(number)) for number in numbers))
        await ledger.finish(RUN, 1, [outcome(number) for number in numbers])
        for number in (29, 30):
            await ledger.add_snapshot(snapshot(number), 1)
        old = cutoffs(unretrieved_s=10.0, request_s=10.0)
        again = [ledger.submit(operation(number, f"again-{number}")) for number in range(1, 30)]
        answers = await asyncio.gather(
            *again[:15], ledger.expire(RUN, 1, old), *again[15:], return_exceptions=True
        )
        refusals = [answer for answer in answers if isinstance(answer, SequenceNumberReusedError)]
        assert len(refusals) == 29
        assert await ledger.expired_through(RUN) == 29
        assert [r.sequence_number for r in await ledger.operations_from(RUN, 1)] == [30]

    async def test_what_is_due_is_dropped_in_bounded_parts(self, ledger: Ledger) -> None:
        numbers = range(1, 252)
        await asyncio.gather(*(ledger.submit(operation(number)) for number in numbers))
        await ledger.finish(RUN, 1, [outcome(number) for number in numbers])
        for number in (250, 251):
            await ledger.add_snapshot(snapshot(number), 1)
        old = cutoffs(unretrieved_s=10.0, request_s=10.0)
        parts = []
        while not (dropped := await ledger.expire(RUN, 1, old)).is_empty:
            parts.append((dropped.num_results, dropped.num_payloads, dropped.num_rows))
        assert [sum(column) for column in zip(*parts, strict=True)] == [251, 250, 250]
        assert len(parts) > 1
        assert (await ledger.resume_point(RUN)).next_sequence_number == 252

    @pytest.mark.parametrize("epoch", [0, 2])
    async def test_another_epoch_drops_nothing(self, ledger: Ledger, epoch: int) -> None:
        await ledger.submit(operation(1))
        await ledger.finish(RUN, 1, [outcome(1)])
        with pytest.raises(FencedError):
            await ledger.note_retrieved(RUN, epoch, {1: 5.0})
        with pytest.raises(FencedError):
            await ledger.expire(RUN, epoch, cutoffs(unretrieved_s=10.0))
        with pytest.raises(FencedError):
            await ledger.named_payloads(RUN, epoch, ["a"])
        record = await ledger.get_operation(RUN, 1)
        assert record is not None
        assert (record.is_expired, record.retrieve_time_s) == (False, None)

    async def test_a_run_resumes_at_a_gap_above_its_snapshots(self, ledger: Ledger) -> None:
        for number in (1, 2, 3, 5, 6):
            await ledger.refuse(operation(number), b"why")
        await ledger.add_snapshot(snapshot(2), 1)
        point = await ledger.resume_point(RUN)
        assert point.next_sequence_number == 4
        assert [record.sequence_number for record in point.finished_ahead] == [5, 6]
        await ledger.submit(operation(8))
        await ledger.submit(operation(4))
        assert (await ledger.resume_point(RUN)).next_sequence_number == 4
        await ledger.finish(RUN, 1, [outcome(4)])
        assert (await ledger.resume_point(RUN)).next_sequence_number == 7
