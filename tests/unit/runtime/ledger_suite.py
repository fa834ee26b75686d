"""What every ledger promises, whatever its database.

A test module subclasses `LedgerSuite` and has a fixture `open_ledger`: a function that opens the
same database again each time it is called.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tinsmith_runtime.errors import (
    AbortedError,
    CheckpointAlreadyExistsError,
    CheckpointNotFoundError,
    QueueFullError,
    RequestIdReusedError,
    RunNotFoundError,
    SequenceGapError,
    SequenceNumberReusedError,
)
from tinsmith_runtime.ledger import (
    Attempts,
    CheckpointChanges,
    CheckpointRecord,
    Commit,
    Cutoffs,
    ExportRecord,
    Ledger,
    NewOperation,
    OperationOutcome,
    OperationState,
    RunRecord,
    SnapshotRecord,
    StoredFile,
    TaskRecord,
)
from tinsmith_runtime.ledger.records import GIVEN_UP_KIND, FencedError
from tinsmith_runtime.records import HISTORY_RETENTION_S, AuditEvent

OpenLedger = Callable[[], Ledger]
RUN = "projects/p/trainingRuns/r"
OTHER = "projects/p/trainingRuns/other"
KEY = "key-1"


def run_record(name: str = RUN, epoch: int = 1, **fields: Any) -> RunRecord:
    return RunRecord(name=name, base_model="tiny", adapter="{}", epoch=epoch, **fields)


def attempts(numbers: dict[int, int], run: str = RUN, *, epoch: int = 1) -> Attempts:
    return Attempts(run=run, epoch=epoch, numbers=numbers)


def operation(number: int, request_id: str = "", digest: bytes = b"d", **fields: Any) -> Any:
    values: dict[str, Any] = {
        "run": RUN,
        "epoch": 1,
        "sequence_number": number,
        "kind": "forward_backward",
        "request_id": request_id or f"id-{number}",
        "digest": digest,
        "payload": b"payload",
        "payload_path": None,
        "submit_time_s": 5.0,
    }
    return NewOperation(**values | fields)


def outcome(number: int, *, result: bytes | None = b"result", **fields: Any) -> OperationOutcome:
    values: dict[str, Any] = {
        "sequence_number": number,
        "result": result,
        "error": None if result is not None else b"error",
        "version": number,
        "plan": "fingerprint",
        "finish_time_s": 6.0,
    }
    return OperationOutcome(**values | fields)


def snapshot(number: int, run: str = RUN, **fields: Any) -> SnapshotRecord:
    values: dict[str, Any] = {
        "run": run,
        "sequence_number": number,
        "version": 1,
        "folder": f"{run}/{number}",
        "sha256": "ab",
        "create_time_s": 7.0,
    }
    return SnapshotRecord(**values | fields)


def checkpoint(
    name: str, run: str = RUN, create_time_s: float = 7.0, **fields: Any
) -> CheckpointRecord:
    values: dict[str, Any] = {
        "name": f"{run}/checkpoints/{name}",
        "run": run,
        "kind": "training",
        "base_model": "tiny",
        "adapter": "{}",
        "version": 1,
        "sequence_number": 1,
        "size_bytes": 10,
        "folder": f"{run}/{name}",
        "sha256": "ab",
        "create_time_s": create_time_s,
        "labels": {"note": "good"},
        "files": (StoredFile(name="a.safetensors", size_bytes=10, sha256="cd"),),
    }
    return CheckpointRecord(**values | fields)


def export(name: str, **fields: Any) -> ExportRecord:
    values: dict[str, Any] = {
        "name": f"{RUN}/checkpoints/{name}/exports/peft",
        "checkpoint": f"{RUN}/checkpoints/{name}",
        "run": RUN,
        "format": "peft",
        "folder": f"{RUN}/exports/{name}",
        "sha256": "ef",
        "size_bytes": 3,
        "files": (StoredFile(name="b.safetensors", size_bytes=3, sha256="01"),),
        "create_time_s": 8.0,
        "expire_time_s": 100.0,
    }
    return ExportRecord(**values | fields)


def task(name: str, **fields: Any) -> TaskRecord:
    values: dict[str, Any] = {
        "name": f"{RUN}/operations/copy-{name}",
        "run": RUN,
        "kind": "copy",
        "checkpoint": f"{RUN}/checkpoints/c",
        "digest": b"d",
        "payload": b"payload",
        "submit_time_s": 5.0,
    }
    return TaskRecord(**values | fields)


def cutoffs(
    *, retrieved_s: float = 0.0, unretrieved_s: float = 0.0, request_s: float = 0.0
) -> Cutoffs:
    return Cutoffs(
        now_s=request_s + HISTORY_RETENTION_S,
        retrieved_s=retrieved_s,
        unretrieved_s=unretrieved_s,
    )


class LedgerSuite:
    """The conformance suite; see the module."""

    @pytest.fixture
    async def ledger(self, open_ledger: OpenLedger) -> Any:
        ledger = open_ledger()
        await ledger.open()
        await ledger.adopt_run(run_record())
        yield ledger
        await ledger.close()

    # Runs.

    async def test_a_run_is_created_once_and_its_epoch_rises(self, ledger: Ledger) -> None:
        assert await ledger.adopt_run(run_record()) == run_record()
        changed = RunRecord(name=RUN, base_model="other", adapter="[]", epoch=4)
        assert await ledger.adopt_run(changed) == run_record(epoch=4)
        with pytest.raises(AbortedError) as failure:
            await ledger.adopt_run(run_record(epoch=3))
        assert failure.value.metadata == {"run": RUN, "epoch": "4"}
        assert await ledger.list_runs() == [run_record(epoch=4)]

    async def test_a_deleted_run_takes_everything_with_it(self, ledger: Ledger) -> None:
        await ledger.adopt_run(run_record(OTHER))
        await ledger.submit(operation(1))
        await ledger.submit(operation(1, run=OTHER))
        await ledger.finish(
            RUN, 1, [outcome(1)], checkpoints=[checkpoint("a")], snapshots=[snapshot(1)]
        )
        with pytest.raises(FencedError):
            await ledger.delete_run(RUN, 2)
        await ledger.delete_run(RUN, 1)
        assert [run.name for run in await ledger.list_runs()] == [OTHER]
        assert await ledger.get_operation(RUN, 1) is None
        assert await ledger.list_snapshots(RUN) == []
        assert await ledger.get_checkpoint(checkpoint("a").name) is None
        assert await ledger.get_operation(OTHER, 1) is not None

    async def test_a_deleted_run_accepts_nothing(self, ledger: Ledger) -> None:
        await ledger.delete_run(RUN, 1)
        with pytest.raises(RunNotFoundError):
            await ledger.submit(operation(1))
        assert await ledger.refuse(operation(1), b"error") is None
        await ledger.adopt_run(run_record())
        assert (await ledger.resume_point(RUN)).next_sequence_number == 1
        assert (await ledger.submit(operation(1))).state is OperationState.PENDING

    async def test_a_divergence_is_remembered(self, ledger: Ledger) -> None:
        await ledger.adopt_run(run_record(OTHER))
        await ledger.mark_diverged(RUN, 1)
        found = {run.name: run.replay_diverged for run in await ledger.list_runs()}
        assert found == {RUN: True, OTHER: False}

    # Operations.

    async def test_a_submitted_operation_waits(self, ledger: Ledger) -> None:
        record = await ledger.submit(operation(3))
        assert (record.state, record.num_attempts, record.revision) == ("pending", 0, 0)
        assert await ledger.get_operation(RUN, 3) == record
        assert await ledger.get_operation(RUN, 1) is None
        assert await ledger.get_operation(OTHER, 3) is None
        (full,) = await ledger.operations_from(RUN, 1)
        assert full.payload == b"payload"

    async def test_the_same_request_is_the_same_operation(self, ledger: Ledger) -> None:
        first = await ledger.submit(operation(1))
        assert await ledger.submit(operation(1)) == first
        # Even under another number: the id says that it is the same request.
        assert await ledger.submit(operation(2, "id-1")) == first
        await ledger.finish(RUN, 1, [outcome(1)])
        again = await ledger.submit(operation(1))
        assert (again.state, again.result) == (OperationState.SUCCEEDED, b"result")

    async def test_calls_of_one_request_that_race_make_one_operation(self, ledger: Ledger) -> None:
        records = await asyncio.gather(*(ledger.submit(operation(1)) for _ in range(20)))
        assert records == [records[0]] * 20
        assert len(await ledger.operations_from(RUN, 1)) == 1

    async def test_a_request_id_is_used_once(self, ledger: Ledger) -> None:
        await ledger.submit(operation(1))
        for number in (1, 2):
            with pytest.raises(RequestIdReusedError) as failure:
                await ledger.submit(operation(number, "id-1", b"other"))
            assert failure.value.metadata["request_id"] == "id-1"
        await ledger.adopt_run(run_record(OTHER))
        assert (await ledger.submit(operation(1, "id-1", b"other", run=OTHER))).run == OTHER

    async def test_a_number_is_used_once(self, ledger: Ledger) -> None:
        await ledger.submit(operation(1))
        with pytest.raises(SequenceNumberReusedError) as failure:
            await ledger.submit(operation(1, "another"))
        assert failure.value.metadata["sequence_number"] == "1"

    async def test_a_refusal_consumes_its_number(self, ledger: Ledger) -> None:
        record = await ledger.refuse(operation(1), b"why")
        assert record is not None
        assert (record.state, record.error, record.revision) == ("failed", b"why", 1)
        assert await ledger.refuse(operation(1), b"again") is None
        assert (await ledger.submit(operation(1))).error == b"why"
        point = await ledger.resume_point(RUN)
        assert (point.next_sequence_number, point.latest_revision) == (2, 1)

    async def test_a_refusal_does_not_take_the_id_of_another_operation(
        self, ledger: Ledger
    ) -> None:
        first = await ledger.submit(operation(1))
        refused = await ledger.refuse(operation(2, "id-1", b"other"), b"why")
        assert refused is not None
        assert refused.request_id is None
        assert await ledger.submit(operation(1)) == first

    async def test_attempts_are_counted(self, ledger: Ledger) -> None:
        for number in (1, 2, 3):
            await ledger.submit(operation(number))
        await ledger.start_all([attempts({1: 1, 2: 1})])
        await ledger.start_all([attempts({1: 2})])
        await ledger.start_all([attempts({1: 2})])  # a repeat
        found = [record.num_attempts for record in await ledger.operations_from(RUN, 1)]
        assert found == [2, 1, 0]

    # Results.

    async def test_results_are_committed_together(self, ledger: Ledger) -> None:
        for number in (1, 2):
            await ledger.submit(operation(number))
        records = await ledger.finish(RUN, 1, [outcome(1), outcome(2, result=None)])
        assert [(r.state, r.result, r.error, r.revision, r.plan) for r in records] == [
            (OperationState.SUCCEEDED, b"result", None, 1, "fingerprint"),
            (OperationState.FAILED, None, b"error", 2, "fingerprint"),
        ]
        assert (await ledger.list_runs())[0].version == 2
        assert await ledger.get_operation(RUN, 2) == records[1]

    @pytest.mark.parametrize("epoch", [0, 2])
    async def test_another_epoch_commits_nothing(self, ledger: Ledger, epoch: int) -> None:
        await ledger.submit(operation(1))
        with pytest.raises(FencedError):
            await ledger.finish(RUN, epoch, [outcome(1)], checkpoints=[checkpoint("a")])
        with pytest.raises(FencedError):
            await ledger.give_up(RUN, epoch, [2], b"gap")
        with pytest.raises(FencedError):
            await ledger.add_snapshot(snapshot(1), epoch)
        assert (await ledger.resume_point(RUN)).next_sequence_number == 1
        assert await ledger.get_checkpoint(checkpoint("a").name) is None

    async def test_attempts_of_several_runs_are_counted_in_one_write(self, ledger: Ledger) -> None:
        await ledger.adopt_run(run_record(OTHER))
        for run in (RUN, OTHER):
            for number in (1, 2):
                await ledger.submit(operation(number, run=run))
        await ledger.start_all([attempts({1: 1, 2: 1}), attempts({1: 1}, OTHER)])
        found = {
            run: [o.num_attempts for o in await ledger.operations_from(run, 1)]
            for run in (RUN, OTHER)
        }
        assert found == {RUN: [1, 1], OTHER: [1, 0]}

    async def test_runs_are_committed_beside_each_other_and_each_alone(
        self, ledger: Ledger
    ) -> None:
        await ledger.adopt_run(run_record(OTHER))
        for run in (RUN, OTHER):
            await ledger.submit(operation(1, run=run))
        await ledger.adopt_run(run_record(epoch=2))
        fenced, finished = await ledger.finish_all(
            [
                Commit(run=RUN, epoch=1, outcomes=[outcome(1)]),
                Commit(run=OTHER, epoch=1, outcomes=[outcome(1)]),
            ]
        )
        assert isinstance(fenced, FencedError)
        assert isinstance(finished, list)
        assert [(o.run, o.sequence_number, o.result) for o in finished] == [(OTHER, 1, b"result")]
        waiting = await ledger.get_operation(RUN, 1)
        assert waiting is not None
        assert waiting.state is OperationState.PENDING
        assert [(r.name, r.version) for r in await ledger.list_runs()] == [(OTHER, 1), (RUN, 0)]
        assert await ledger.finish_all([]) == []

    async def test_a_deletion_is_remembered_until_the_files_are_gone(self, ledger: Ledger) -> None:
        assert await ledger.list_deletions() == []
        for _ in range(2):
            await ledger.delete_run(RUN, 1)
            assert await ledger.list_deletions() == [RUN]
            await ledger.adopt_run(run_record())
        await ledger.forget_deletion(RUN)
        await ledger.forget_deletion(RUN)
        assert await ledger.list_deletions() == []

    async def test_a_result_is_committed_once_and_with_all_others_or_none(
        self, ledger: Ledger
    ) -> None:
        for number in (1, 2):
            await ledger.submit(operation(number))
        await ledger.finish(RUN, 1, [outcome(1)])
        with pytest.raises(FencedError):
            await ledger.finish(RUN, 1, [outcome(2), outcome(1, result=b"other")])
        assert (await ledger.resume_point(RUN)).next_sequence_number == 2
        first = await ledger.get_operation(RUN, 1)
        assert first is not None
        assert first.result == b"result"

    async def test_a_checkpoint_that_exists_undoes_the_commit(self, ledger: Ledger) -> None:
        for number in (1, 2):
            await ledger.submit(operation(number))
        await ledger.finish(RUN, 1, [outcome(1)], checkpoints=[checkpoint("a")])
        with pytest.raises(CheckpointAlreadyExistsError):
            await ledger.finish(RUN, 1, [outcome(2)], checkpoints=[checkpoint("a")])
        assert (await ledger.resume_point(RUN)).next_sequence_number == 2

    async def test_numbers_that_never_came_are_given_up(self, ledger: Ledger) -> None:
        await ledger.submit(operation(3))
        await ledger.submit(operation(2))  # arrived at the last moment
        assert await ledger.give_up(RUN, 1, [1, 2], b"gap") == [1]
        with pytest.raises(SequenceGapError) as failure:
            await ledger.submit(operation(1))
        assert failure.value.metadata["missing"] == "1"
        given_up = await ledger.get_operation(RUN, 1)
        assert given_up is not None
        assert (given_up.kind, given_up.error) == (GIVEN_UP_KIND, b"gap")
        assert (await ledger.resume_point(RUN)).next_sequence_number == 2

    # Reading.

    async def test_a_run_resumes_at_its_first_number_without_a_result(self, ledger: Ledger) -> None:
        assert (await ledger.resume_point(RUN)).next_sequence_number == 1
        for number in (1, 2, 4):
            await ledger.submit(operation(number))
        await ledger.refuse(operation(5), b"why")
        await ledger.finish(RUN, 1, [outcome(1)])
        point = await ledger.resume_point(RUN)
        assert point.next_sequence_number == 2
        assert [record.sequence_number for record in point.pending] == [2, 4]
        assert [record.payload for record in point.pending] == [b"payload"] * 2
        assert [record.sequence_number for record in point.finished_ahead] == [5]
        assert point.latest_revision == 2

    async def test_operations_are_listed_in_order_from_a_number(self, ledger: Ledger) -> None:
        for number in (3, 1, 2, 9):
            await ledger.submit(operation(number))
        found = await ledger.operations_from(RUN, 2, limit=2)
        assert [record.sequence_number for record in found] == [2, 3]

    async def test_finished_operations_are_read_in_the_order_of_their_ends(
        self, ledger: Ledger
    ) -> None:
        for number in (1, 2, 3):
            await ledger.submit(operation(number))
        await ledger.refuse(operation(9), b"why")
        await ledger.finish(RUN, 1, [outcome(1, result=b"x" * 60), outcome(2, result=b"x" * 60)])

        async def numbers(after: int, limit: int = 10, limit_bytes: int = 1000) -> list[int]:
            found = await ledger.finished_after(RUN, after, limit=limit, limit_bytes=limit_bytes)
            return [record.sequence_number for record in found]

        assert await numbers(0) == [9, 1, 2]
        assert await numbers(1) == [1, 2]
        assert await numbers(0, limit=2) == [9, 1]
        assert await numbers(1, limit_bytes=100) == [1]
        assert await numbers(1, limit_bytes=1) == [1]  # at least one, or it would never be read
        assert await numbers(3) == []

    # Checkpoints.

    async def test_checkpoints_are_listed_newest_first_by_project_and_run(
        self, ledger: Ledger
    ) -> None:
        foreign = "projects/q/trainingRuns/r"
        for run in (OTHER, foreign):
            await ledger.adopt_run(run_record(run))
        saved = [
            checkpoint("a", create_time_s=1.0),
            checkpoint("b", create_time_s=2.0),
            checkpoint("c", create_time_s=2.0),
            checkpoint("d", OTHER, create_time_s=3.0),
        ]
        for record in [*saved, checkpoint("e", foreign)]:
            number = saved.index(record) + 1 if record in saved else 1
            await ledger.submit(operation(number, run=record.run))
            await ledger.finish(record.run, 1, [outcome(number)], checkpoints=[record])
        a, b, c, d = saved

        async def listed(run: str | None, limit: int = 10, after: Any = None) -> Any:
            return await ledger.list_checkpoints("p", run, limit=limit, after=after)

        assert await listed(None) == [d, c, b, a]
        assert await listed(RUN) == [c, b, a]
        assert await listed(None, limit=2) == [d, c]
        assert await listed(None, after=(c.create_time_s, c.name)) == [b, a]
        assert await ledger.get_checkpoint(a.name) == a
        assert await ledger.delete_checkpoint(a.name, key_id=KEY, now_s=20.0) == a
        assert await ledger.delete_checkpoint(a.name, key_id=KEY, now_s=20.0) is None
        assert await listed(RUN) == [c, b]

    # Durability.

    # The life of a checkpoint.

    async def _save(self, ledger: Ledger, *saved: CheckpointRecord) -> None:
        number = (await ledger.resume_point(RUN)).next_sequence_number
        await ledger.submit(operation(number))
        await ledger.finish(RUN, 1, [outcome(number)], checkpoints=saved)

    async def test_a_checkpoint_is_changed_where_it_is_told_to(self, ledger: Ledger) -> None:
        saved = checkpoint("a", expire_time_s=50.0)
        await self._save(ledger, saved)
        assert await ledger.get_checkpoint(saved.name) == saved

        async def change(now_s: float = 10.0, **fields: Any) -> CheckpointRecord | None:
            changes = CheckpointChanges(**fields)
            return await ledger.update_checkpoint(saved.name, changes, key_id=KEY, now_s=now_s)

        found = await change(is_published=True)
        assert found == dataclasses.replace(saved, is_published=True)
        found = await change(labels={"x": "1"}, is_published=False)
        assert found == dataclasses.replace(saved, labels={"x": "1"})
        assert await change() == found
        # One that expired is not brought back.
        assert await change(now_s=50.0, sets_expiry=True) is None
        found = await change(sets_expiry=True)
        assert found is not None
        assert found.expire_time_s is None
        unknown = f"{RUN}/checkpoints/b"
        none = await ledger.update_checkpoint(
            unknown, CheckpointChanges(is_published=True), key_id=KEY, now_s=1.0
        )
        assert none is None

    async def test_what_expires_leaves_a_tombstone_and_folders(self, ledger: Ledger) -> None:
        kept = checkpoint("kept")
        short = checkpoint("short", expire_time_s=20.0)
        later = checkpoint("later", expire_time_s=30.0)
        await self._save(ledger, kept, short, later)
        project = "p"
        listed = await ledger.list_checkpoints(project, RUN, limit=9, after=None, now_s=25.0)
        assert {found.name for found in listed} == {kept.name, later.name}
        assert await ledger.expire_checkpoints(now_s=19.9, not_before_s=0.0) == 0
        assert await ledger.expire_checkpoints(now_s=20.0, not_before_s=60.0) == 1
        assert await ledger.expire_checkpoints(now_s=20.0, not_before_s=60.0) == 0
        assert await ledger.get_checkpoint(short.name) is None
        assert await ledger.get_expiry(short.name) == 20.0
        assert await ledger.get_expiry(kept.name) is None
        assert await ledger.list_folder_deletions(now_s=59.0) == []
        assert await ledger.list_folder_deletions(now_s=60.0) == [short.folder]
        await ledger.forget_folder_deletion(short.folder)
        assert await ledger.list_folder_deletions(now_s=60.0) == []
        await ledger.forget_expired(before_s=20.0)
        assert await ledger.get_expiry(short.name) == 20.0
        # A new one of the name takes the tombstone away; so does time.
        await self._save(ledger, short)
        assert await ledger.get_expiry(short.name) is None
        await ledger.expire_checkpoints(now_s=99.0, not_before_s=0.0)
        assert await ledger.get_expiry(later.name) == 30.0
        await ledger.forget_expired(before_s=31.0)
        assert await ledger.get_expiry(later.name) is None
        assert await ledger.get_checkpoint(kept.name) == kept

    async def test_a_deleted_checkpoint_takes_its_exports_along(self, ledger: Ledger) -> None:
        await self._save(ledger, checkpoint("a"), checkpoint("b"))
        for name in ("a", "b"):
            accepted = await ledger.submit_task(task(name), max_pending=5)
            await ledger.finish_task(
                accepted, 1, finish_time_s=9.0, result=b"r", export=export(name)
            )
        assert await ledger.get_export(export("a").name) == export("a")
        assert await ledger.delete_checkpoint(
            checkpoint("a").name, key_id=KEY, now_s=20.0
        ) == checkpoint("a")
        assert await ledger.delete_checkpoint(checkpoint("a").name, key_id=KEY, now_s=20.0) is None
        assert await ledger.get_export(export("a").name) is None
        assert await ledger.get_export(export("b").name) == export("b")
        folders = await ledger.list_folder_deletions(now_s=0.0)
        assert set(folders) == {checkpoint("a").folder, export("a").folder}
        # An export expires by itself.
        assert await ledger.expire_checkpoints(now_s=100.0, not_before_s=0.0) == 1
        assert await ledger.get_export(export("b").name) is None
        assert await ledger.get_checkpoint(checkpoint("b").name) is not None

    async def test_an_export_replaces_the_one_before(self, ledger: Ledger) -> None:
        await self._save(ledger, checkpoint("a"))
        renewed = export("a", expire_time_s=200.0)
        moved = export("a", folder="elsewhere")
        for name, made in (("1", export("a")), ("2", renewed), ("3", moved)):
            accepted = await ledger.submit_task(task(name), max_pending=5)
            await ledger.finish_task(accepted, 1, finish_time_s=9.0, result=b"r", export=made)
            assert await ledger.get_export(made.name) == made
            folders = await ledger.list_folder_deletions(now_s=9.0)
            assert folders == ([export("a").folder] if name == "3" else [])

    # Tasks.

    async def test_a_task_is_accepted_once_and_waits(self, ledger: Ledger) -> None:
        first = await ledger.submit_task(task("a"), max_pending=2)
        assert await ledger.submit_task(task("a", submit_time_s=6.0), max_pending=2) == first
        with pytest.raises(RequestIdReusedError):
            await ledger.submit_task(task("a", digest=b"other"), max_pending=2)
        second = await ledger.submit_task(task("b", submit_time_s=4.0), max_pending=2)
        with pytest.raises(QueueFullError):
            await ledger.submit_task(task("c"), max_pending=2)
        assert await ledger.submit_task(task("a"), max_pending=2) == first
        assert await ledger.list_pending_tasks() == [second, first]
        assert await ledger.get_task(task("c").name) is None
        with pytest.raises(RunNotFoundError):
            await ledger.submit_task(task("d", run=OTHER), max_pending=9)

    async def test_a_task_ends_once_with_its_row_or_without(self, ledger: Ledger) -> None:
        accepted = await ledger.submit_task(task("a"), max_pending=5)
        made = checkpoint("c")

        async def finish(epoch: int = 1, **fields: Any) -> TaskRecord:
            return await ledger.finish_task(accepted, epoch, finish_time_s=9.0, **fields)

        with pytest.raises(FencedError):
            await finish(epoch=2, result=b"r", checkpoint=made)
        assert await ledger.get_checkpoint(made.name) is None
        with pytest.raises(CheckpointNotFoundError):
            await finish(result=b"r", export=export("none"))
        assert (await ledger.list_pending_tasks())[0] == accepted
        done = await finish(result=b"r", checkpoint=made)
        assert (done.state, done.result, done.finish_time_s) == ("succeeded", b"r", 9.0)
        assert await ledger.get_task(accepted.name) == done
        assert await ledger.get_checkpoint(made.name) == made
        with pytest.raises(FencedError):
            await finish(error=b"e")
        accepted = await ledger.submit_task(task("b"), max_pending=5)
        with pytest.raises(CheckpointAlreadyExistsError):
            await finish(result=b"r", checkpoint=made)
        failed = await finish(error=b"e")
        assert (failed.state, failed.error, failed.result) == ("failed", b"e", None)
        assert await ledger.list_pending_tasks() == []
        await ledger.forget_expired(before_s=9.0)
        assert await ledger.get_task(failed.name) == failed
        await ledger.forget_expired(before_s=9.1)
        assert await ledger.get_task(failed.name) is None

    async def test_a_deleted_run_takes_tasks_exports_and_tombstones_along(
        self, ledger: Ledger
    ) -> None:
        await self._save(ledger, checkpoint("a"), checkpoint("b", expire_time_s=1.0))
        accepted = await ledger.submit_task(task("a"), max_pending=5)
        await ledger.finish_task(accepted, 1, finish_time_s=9.0, result=b"r", export=export("a"))
        await ledger.submit_task(task("b"), max_pending=5)
        await ledger.expire_checkpoints(now_s=2.0, not_before_s=0.0)
        await ledger.delete_run(RUN, 1)
        assert await ledger.get_export(export("a").name) is None
        assert await ledger.get_task(accepted.name) is None
        assert await ledger.list_pending_tasks() == []
        assert await ledger.get_expiry(checkpoint("b").name) is None

    # The audit trail.

    async def _events(self, ledger: Ledger, **fields: Any) -> list[tuple[float, str, str, str]]:
        found = await ledger.list_events("p", **{"limit": 99, **fields})
        return [(one.time_s, one.key_id, one.action, one.resource) for one in found]

    async def test_a_change_of_a_checkpoint_is_recorded_and_a_repeat_is_not(
        self, ledger: Ledger
    ) -> None:
        saved = checkpoint("a", kind="sampler", expire_time_s=50.0)
        await self._save(ledger, saved)
        both = CheckpointChanges(is_published=True, sets_expiry=True)
        for now_s, changes in (
            (10.0, CheckpointChanges(is_published=False, labels=saved.labels)),
            (11.0, CheckpointChanges(is_published=True)),
            (12.0, CheckpointChanges(is_published=True)),
            (13.0, CheckpointChanges(sets_expiry=True, expire_time_s=50.0)),
            (14.0, CheckpointChanges(is_published=False)),
            (15.0, both),
            (16.0, both),
            (17.0, CheckpointChanges(labels={"x": "1"})),
        ):
            await ledger.update_checkpoint(saved.name, changes, key_id=KEY, now_s=now_s)
        for _ in range(2):
            await ledger.delete_checkpoint(saved.name, key_id="key-2", now_s=18.0)
        assert await self._events(ledger) == [
            (11.0, KEY, "publish_checkpoint", saved.name),
            (14.0, KEY, "unpublish_checkpoint", saved.name),
            (15.0, KEY, "update_checkpoint", saved.name),
            (15.0, KEY, "publish_checkpoint", saved.name),
            (17.0, KEY, "update_checkpoint", saved.name),
            (18.0, "key-2", "delete_checkpoint", saved.name),
        ]
        kinds = {one.checkpoint_kind for one in await ledger.list_events("p", limit=99)}
        assert kinds == {"sampler"}

    async def test_what_expired_or_never_was_leaves_no_event(self, ledger: Ledger) -> None:
        saved = checkpoint("a", expire_time_s=50.0)
        await self._save(ledger, saved)
        publish = CheckpointChanges(is_published=True)
        for name, now_s in ((saved.name, 50.0), (f"{RUN}/checkpoints/none", 1.0)):
            assert await ledger.update_checkpoint(name, publish, key_id=KEY, now_s=now_s) is None
        await ledger.expire_checkpoints(now_s=50.0, not_before_s=0.0)
        assert await ledger.delete_checkpoint(saved.name, key_id=KEY, now_s=51.0) is None
        assert await self._events(ledger) == []

    async def test_the_event_of_a_task_comes_with_its_row(self, ledger: Ledger) -> None:
        async def finish(name: str, kind: str, **fields: Any) -> None:
            accepted = await ledger.submit_task(task(name, kind=kind, key_id=KEY), max_pending=9)
            assert await self._events(ledger) == before
            await ledger.finish_task(accepted, 1, finish_time_s=9.0, **fields)

        before: list[tuple[float, str, str, str]] = []
        made = checkpoint("c")
        await finish("1", "copy", result=b"r", checkpoint=made)
        before = [(9.0, KEY, "copy_checkpoint", made.name)]
        assert await self._events(ledger) == before
        with pytest.raises(CheckpointAlreadyExistsError):
            await finish("2", "import", result=b"r", checkpoint=made)
        await finish("3", "export", error=b"e")
        assert await self._events(ledger) == before
        await finish("4", "export", result=b"r", export=export("c"))
        before.append((9.0, KEY, "export_checkpoint", made.name))
        assert await self._events(ledger) == before
        # A repeat by another key is not its task.
        await ledger.submit_task(task("4", kind="export", key_id="key-2"), max_pending=9)
        await ledger.delete_run(RUN, 1)
        assert await self._events(ledger) == before

    async def test_events_are_listed_by_time_in_pages_and_forgotten(self, ledger: Ledger) -> None:
        def event(time_s: float, name: str, project: str = "p") -> AuditEvent:
            return AuditEvent(
                time_s=time_s,
                key_id=KEY,
                action="download_checkpoint",
                resource=f"projects/{project}/trainingRuns/r/checkpoints/{name}",
                checkpoint_kind="training",
            )

        # Trainers have clocks of their own: what was written later may have happened before.
        for time_s, name in ((2.0, "b"), (1.0, "a"), (2.0, "c"), (3.0, "d")):
            await ledger.record_event(event(time_s, name))
        await ledger.record_event(event(2.0, "foreign", "q"))

        async def listed(**fields: Any) -> str:
            found = await self._events(ledger, **fields)
            return "".join(resource.rpartition("/")[2] for *_, resource in found)

        assert await listed() == "abcd"
        assert await listed(start_s=2.0, end_s=3.0) == "bc"
        pages, after = "", None
        while found := await ledger.list_events("p", limit=1, after=after):
            pages += found[0].resource[-1]
            after = (found[0].time_s, found[0].serial)
        assert pages == "abcd"
        assert await ledger.forget_events(before_s=2.0) == 1
        assert await ledger.forget_events(before_s=2.0) == 0
        assert await listed() == "bcd"

    async def test_everything_is_there_after_it_was_opened_again(
        self, open_ledger: OpenLedger
    ) -> None:
        first = open_ledger()
        await first.open()
        await first.adopt_run(run_record(epoch=3))
        for number in (1, 2):
            await first.submit(operation(number, epoch=3))
        await first.start_all([attempts({1: 1, 2: 1})])
        await first.finish(RUN, 3, [outcome(1)], checkpoints=[checkpoint("a")])
        await first.add_snapshot(snapshot(1), 3)
        publish = CheckpointChanges(is_published=True)
        await first.update_checkpoint(checkpoint("a").name, publish, key_id=KEY, now_s=8.0)
        before = await self._everything(first)
        await first.close()
        again = open_ledger()
        await again.open()
        assert await self._everything(again) == before
        with pytest.raises(AbortedError):
            await again.adopt_run(run_record(epoch=2))
        await again.close()

    async def _everything(self, ledger: Ledger) -> list[Any]:
        return [
            await ledger.list_runs(),
            await ledger.operations_from(RUN, 1),
            await ledger.resume_point(RUN),
            await ledger.list_snapshots(RUN),
            await ledger.list_checkpoints("p", None, limit=10, after=None),
            await ledger.list_events("p", limit=10),
        ]
