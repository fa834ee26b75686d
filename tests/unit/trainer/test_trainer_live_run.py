"""The bookkeeping of one run, without engine, ledger or loop."""

from __future__ import annotations

import asyncio

import pytest
from tests.fakes.live_runs import finished, make_run, queued

from tinsmith_runtime.ledger import OperationRecord
from tinsmith_trainer.runs.operations import Kind
from tinsmith_trainer.runs.run import LiveRun, RunLock


def finish_all(run: LiveRun) -> list[int]:
    """Finish what is in the queue without a gap."""
    numbers = []
    while run.queue.next_sequence_number in run.queue:
        numbers.append(run.queue.next_sequence_number)
        run.queue.finish([finished(numbers[-1], run.queue.latest_revision + 1)])
    return numbers


@pytest.mark.parametrize(
    ("letters", "wanted"),
    [
        ("", []),
        ("bo", []),
        ("b.o", []),  # the first can run: nothing is held up yet
        (".o", [1]),
        ("...o", [1, 2, 3]),
        (".b.o", [1, 3]),
    ],
)
def test_missing_numbers_are_those_that_held_operations_wait_for(
    letters: str, wanted: list[int]
) -> None:
    assert make_run(letters).queue.missing_numbers() == wanted


def test_nothing_is_missing_while_something_runs_or_was_refused() -> None:
    run = make_run(".o")
    run.queue.start([1])
    assert run.queue.missing_numbers() == []
    run.queue.stop()
    assert run.queue.missing_numbers() == [1]
    run.queue.consume(finished(1, 1))
    assert (run.queue.missing_numbers(), run.is_ready) == ([], True)


def test_refused_numbers_are_passed_over_and_fail_the_accumulation() -> None:
    run = make_run("b..o")
    run.queue.consume(finished(3, 1, Kind.OPTIM_STEP))
    run.queue.consume(finished(2, 2, Kind.FORWARD_BACKWARD))
    assert (run.queue.next_sequence_number, run.queue.accumulation.failures) == (1, ())
    assert run.queue.next_free_number == 5
    run.queue.finish([finished(1, 3)])
    assert (run.queue.next_sequence_number, run.queue.accumulation.failures) == (4, (2,))
    assert finish_all(run) == [4]


def test_a_refusal_of_the_past_changes_nothing() -> None:
    run = make_run("b")
    finish_all(run)
    run.queue.consume(finished(1, 5))
    assert (run.queue.next_sequence_number, run.queue.accumulation.failures) == (2, ())


def test_given_up_numbers_may_have_been_gradients() -> None:
    run = make_run("..o")
    run.queue.give_up([1, 2])
    assert (run.queue.next_sequence_number, run.queue.accumulation.failures, run.is_ready) == (
        3,
        (1, 2),
        True,
    )


def test_a_closed_run_is_never_ready() -> None:
    run = make_run("b")
    assert run.is_ready
    run.close()
    assert not run.is_ready


def revisions(records: list[OperationRecord] | None) -> list[int] | None:
    return None if records is None else [r.revision for r in records]


def test_recent_results_are_answered_from_memory_only_if_they_are_all_there() -> None:
    run = make_run("")
    assert run.queue.recent_after(0) is None
    for number in range(1, 301):
        run.queue.consume(finished(number, number))
    assert revisions(run.queue.recent_after(298)) == [299, 300]
    assert revisions(run.queue.recent_after(268)) == [*range(269, 301)]
    assert run.queue.recent_after(267) is None  # the oldest have been dropped
    assert run.queue.recent_after(300) is None


def test_a_hole_in_memory_is_not_skipped() -> None:
    run = make_run("")
    run.queue.consume(finished(1, 1))
    run.queue.consume(finished(3, 3))  # revision 2 is a given-up number, in the ledger alone
    assert run.queue.recent_after(0) is None
    assert revisions(run.queue.recent_after(2)) == [3]


async def test_a_change_wakes_everybody_who_waits() -> None:
    run = make_run("b")
    waits = [asyncio.create_task(run.queue.wait_for_change(60)) for _ in range(3)]
    await asyncio.sleep(0)
    run.queue.notify()
    await asyncio.wait_for(asyncio.gather(*waits), 5)
    await run.queue.wait_for_change(0)


async def test_a_lock_knows_whether_it_can_be_had_at_once_and_tells_its_release() -> None:
    released: list[str] = []
    lock = RunLock(lambda: released.append("released"))
    assert lock.is_free
    async with lock:
        assert not lock.is_free
        waiting = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
    # No task holds it, and still it is promised to the one that waited.
    assert (lock.is_free, released) == (False, ["released"])
    await waiting
    lock.release()
    assert lock.is_free


def test_numbers_that_never_arrived_belong_to_the_client_that_is_gone() -> None:
    run = make_run("b.b")
    assert (run.queue.highest_number, run.queue.end_of_client(2)) == (3, None)
    run.queue.note_client_gone()
    assert [run.queue.end_of_client(number) for number in (2, 3, 4)] == [3, 3, None]
    for number in (5, 6):
        run.queue.accept(queued(number, "b"))
    run.queue.note_client_gone()
    run.queue.note_client_gone()
    assert [run.queue.end_of_client(number) for number in (2, 4, 7)] == [3, 6, None]
    assert make_run("").queue.highest_number == 0
