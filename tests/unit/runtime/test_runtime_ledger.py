"""Both ledgers: the conformance suite, and random histories against a simple model."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.fakes.postgres import PostgresServer, shared_server
from tests.unit.runtime.ledger_suite import (
    RUN,
    LedgerSuite,
    OpenLedger,
    checkpoint,
    operation,
    outcome,
    run_record,
)
from tests.unit.runtime.retention_suite import RetentionSuite

from tinsmith_runtime.errors import (
    AbortedError,
    RequestIdReusedError,
    SequenceGapError,
    SequenceNumberReusedError,
    TinsmithError,
)
from tinsmith_runtime.ledger import (
    Attempts,
    CheckpointChanges,
    Holder,
    Ledger,
    OperationState,
    PostgresLedger,
    SqliteLedger,
)
from tinsmith_runtime.ledger.records import FencedError


class TestSqliteLedger(LedgerSuite, RetentionSuite):
    @pytest.fixture
    def open_ledger(self, tmp_path: Path) -> OpenLedger:
        return lambda: SqliteLedger(tmp_path / "ledger.db")


@pytest.fixture(scope="module")
def migrated(postgres: PostgresServer) -> str:
    """A database with the tables of a ledger: to copy it is quicker than to make them."""

    async def migrate(ledger: Ledger) -> None:
        await ledger.open()
        await ledger.close()

    url = postgres.create_database()
    asyncio.run(migrate(PostgresLedger(url, holder=Holder("trainer-0", "only"))))
    return url.rpartition("/")[2]


class TestPostgresLedger(LedgerSuite, RetentionSuite):
    @pytest.fixture
    def postgres_url(self, postgres: PostgresServer, migrated: str) -> Iterator[str]:
        with postgres.lent_database(template=migrated) as url:
            yield url

    @pytest.fixture
    def open_ledger(self, postgres_url: str) -> OpenLedger:
        return lambda: PostgresLedger(postgres_url, holder=Holder("trainer-0", "only"))

    async def test_what_two_trainers_do_at_once_is_recorded_once(
        self, ledger: Ledger, postgres_url: str
    ) -> None:
        saved = [checkpoint(f"c{number}") for number in range(10)]
        await ledger.submit(operation(1))
        await ledger.finish(RUN, 1, [outcome(1)], checkpoints=saved)
        other = PostgresLedger(postgres_url, holder=Holder("trainer-1", "only"))
        await other.open()
        both = (ledger, other)
        publish = CheckpointChanges(is_published=True)
        for one in saved:
            changed = await asyncio.gather(
                *(each.update_checkpoint(one.name, publish, key_id="k", now_s=8.0) for each in both)
            )
            assert [found is not None and found.is_published for found in changed] == [True, True]
            deleted = await asyncio.gather(
                *(each.delete_checkpoint(one.name, key_id="k", now_s=9.0) for each in both)
            )
            assert sorted(found is None for found in deleted) == [False, True]
        await other.close()
        events = await ledger.list_events("p", limit=99)
        assert [(event.action, event.resource) for event in events] == [
            (action, one.name)
            for action in ("publish_checkpoint", "delete_checkpoint")
            for one in saved
        ]


NUMBERS = st.integers(1, 7)
REQUEST_IDS = st.sampled_from("abcdefg")
DIGESTS = st.sampled_from([b"x", b"y"])


@dataclass
class Entry:
    """An operation of the model; `request_id` is None if it has none of its own."""

    request_id: str | None
    digest: bytes
    state: str = "pending"
    is_given_up: bool = False
    num_attempts: int = 0
    revision: int = 0


class LedgerMachine(RuleBasedStateMachine):
    """One run, few numbers and ids, so that they collide often."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.entries: dict[int, Entry] = {}
        self.revision = 0
        self.epoch = 1
        self.ledger = self.open()
        self.run(self.ledger.open())
        self.run(self.ledger.adopt_run(run_record()))

    def open(self) -> Ledger:
        raise NotImplementedError

    def run(self, call: Awaitable[Any]) -> Any:
        """Return the result of a call, or its error."""

        async def guarded() -> Any:
            try:
                return await call
            except TinsmithError as error:
                return error

        return self.loop.run_until_complete(guarded())

    def teardown(self) -> None:
        self.loop.run_until_complete(self.ledger.close())
        self.loop.close()

    def by_request(self, request_id: str) -> tuple[int, Entry] | None:
        found = [item for item in self.entries.items() if item[1].request_id == request_id]
        return found[0] if found else None

    def next_revision(self) -> int:
        self.revision += 1
        return self.revision

    @rule(number=NUMBERS, request_id=REQUEST_IDS, digest=DIGESTS)
    def submit(self, number: int, request_id: str, digest: bytes) -> None:
        answer = self.run(
            self.ledger.submit(operation(number, request_id, digest, epoch=self.epoch))
        )
        known = self.by_request(request_id)
        if known is not None and known[1].digest == digest:
            assert answer.sequence_number == known[0]
        elif known is not None:
            assert isinstance(answer, RequestIdReusedError)
        elif number not in self.entries:
            assert (answer.sequence_number, answer.state) == (number, "pending")
            self.entries[number] = Entry(request_id, digest)
        elif self.entries[number].is_given_up:
            assert isinstance(answer, SequenceGapError)
        else:
            assert isinstance(answer, SequenceNumberReusedError)

    @rule(number=NUMBERS, request_id=REQUEST_IDS, digest=DIGESTS)
    def refuse(self, number: int, request_id: str, digest: bytes) -> None:
        answer = self.run(
            self.ledger.refuse(operation(number, request_id, digest, epoch=self.epoch), b"why")
        )
        if number in self.entries:
            assert answer is None
            return
        own_id = request_id if self.by_request(request_id) is None else None
        self.entries[number] = Entry(own_id, digest, "failed", revision=self.next_revision())
        assert (answer.request_id, answer.error) == (own_id, b"why")

    @rule(numbers=st.sets(NUMBERS, min_size=1))
    def start(self, numbers: set[int]) -> None:
        attempts = {
            n: self.entries[n].num_attempts + 1 if n in self.entries else 1 for n in numbers
        }
        for _ in range(2):
            self.run(self.ledger.start_all([Attempts(run=RUN, epoch=self.epoch, numbers=attempts)]))
        for number in numbers & self.entries.keys():
            self.entries[number].num_attempts += 1

    @rule(number=NUMBERS)
    def start_as_a_zombie(self, number: int) -> None:
        zombie = Attempts(run=RUN, epoch=self.epoch - 1, numbers={number: 9})
        self.run(self.ledger.start_all([zombie]))

    @rule(numbers=st.sets(NUMBERS, min_size=1, max_size=3), is_good=st.booleans())
    def finish(self, numbers: set[int], is_good: bool) -> None:
        outcomes = [outcome(n, result=b"r" if is_good else None) for n in sorted(numbers)]
        answer = self.run(self.ledger.finish(RUN, self.epoch, outcomes))
        pending = {n for n, entry in self.entries.items() if entry.state == "pending"}
        if not numbers <= pending:
            assert isinstance(answer, FencedError)
            return
        for record in answer:
            entry = self.entries[record.sequence_number]
            entry.state = "succeeded" if is_good else "failed"
            entry.revision = self.next_revision()
        assert [record.sequence_number for record in answer] == sorted(numbers)

    @rule(number=NUMBERS)
    def finish_as_a_zombie(self, number: int) -> None:
        answer = self.run(self.ledger.finish(RUN, self.epoch - 1, [outcome(number)]))
        assert isinstance(answer, FencedError)

    @rule(numbers=st.sets(NUMBERS, min_size=1, max_size=3))
    def give_up(self, numbers: set[int]) -> None:
        answer = self.run(self.ledger.give_up(RUN, self.epoch, sorted(numbers), b"gap"))
        assert answer == sorted(numbers - self.entries.keys())
        for number in answer:
            revision = self.next_revision()
            self.entries[number] = Entry(None, b"", "failed", is_given_up=True, revision=revision)

    @rule(step=st.integers(-1, 1))
    def adopt(self, step: int) -> None:
        answer = self.run(self.ledger.adopt_run(run_record(epoch=self.epoch + step)))
        if step < 0:
            assert isinstance(answer, AbortedError)
        else:
            self.epoch += step
            assert answer.epoch == self.epoch

    @rule()
    def reopen(self) -> None:
        self.loop.run_until_complete(self.ledger.close())
        self.ledger = self.open()
        self.run(self.ledger.open())

    @invariant()
    def the_ledger_agrees_with_the_model(self) -> None:
        records, point, finished = self.run(self.read_all())
        found = {
            record.sequence_number: Entry(
                record.request_id,
                record.digest,
                str(record.state),
                record.kind == "given_up",
                record.num_attempts,
                record.revision,
            )
            for record in records
        }
        assert found == self.entries
        assert [record.revision for record in finished] == list(range(1, self.revision + 1))
        expected = 1
        while expected in self.entries and self.entries[expected].state != "pending":
            expected += 1
        assert point.next_sequence_number == expected
        later = sorted(number for number in self.entries if number >= expected)
        is_pending = {n: self.entries[n].state == OperationState.PENDING for n in later}
        assert [r.sequence_number for r in point.pending] == [n for n in later if is_pending[n]]
        assert [r.sequence_number for r in point.finished_ahead] == [
            n for n in later if not is_pending[n]
        ]
        assert point.latest_revision == self.revision

    async def read_all(self) -> Any:
        return await asyncio.gather(
            self.ledger.operations_from(RUN, 1),
            self.ledger.resume_point(RUN),
            self.ledger.finished_after(RUN, 0, limit=100, limit_bytes=2**20),
        )


class SqliteMachine(LedgerMachine):
    def __init__(self) -> None:
        # In memory where that is possible: what a sync costs is not the point here.
        memory = Path("/dev/shm")
        self.folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        super().__init__()

    def open(self) -> Ledger:
        return SqliteLedger(Path(self.folder.name) / "ledger.db")

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


class PostgresMachine(LedgerMachine):
    def __init__(self) -> None:
        self.url = shared_server().create_database()
        super().__init__()

    def open(self) -> Ledger:
        return PostgresLedger(self.url, holder=Holder("trainer-0", "only"))


TestSqliteHistories = SqliteMachine.TestCase
TestSqliteHistories.settings = settings(
    max_examples=30, stateful_step_count=12, deadline=None, derandomize=True
)
TestPostgresHistories = PostgresMachine.TestCase
TestPostgresHistories.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, derandomize=True
)
