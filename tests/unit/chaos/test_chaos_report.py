"""The judges of the chaos scenarios: they must be able to find fault."""

from __future__ import annotations

import dataclasses

import pytest
from tests.chaos.fsync import Trace
from tests.chaos.report import Row
from tests.chaos.tenants import Training, compare

RUN = "projects/default/trainingRuns/run-1"
ARRIVAL = f'7 recvmsg(9<socket:[1]>, "..{RUN}\\22$0c0ffee0-0000-4000-8000-00000000000', '"...) = 99'
SYNC = "8 fdatasync(5</data/trainer.db-wal> <unfinished ...>"
SYNCED = "8 <... fdatasync resumed>) = 0"
OTHER_SYNC = "8 fdatasync(5</data/scheduler.sqlite-wal>) = 0"
HALVES = (
    f'7 recvmsg(9<socket:[1]>, "..{RUN}\\22$0c0ffee0-0000-4000", iov_len=199) = 99',
    "6 recvmsg(9<socket:[1]>, <unfinished ...>",
    '6 <... recvmsg resumed>"-8000-000000000001..") = 99',
)


def arrival(number: int) -> str:
    return f"{number}".join(ARRIVAL)


def answer(number: int) -> str:
    return f'7 sendmsg(9<socket:[1]>, "..{RUN}/operations/{number}\\22x"...) = 99'


@pytest.mark.parametrize(
    ("lines", "acks"),
    [
        pytest.param([arrival(1), SYNC, SYNCED, answer(1)], [True], id="in-order"),
        pytest.param([arrival(1), answer(1), SYNC, SYNCED], [False], id="answered-first"),
        pytest.param([arrival(1), SYNC, answer(1), SYNCED], [False], id="not-ended"),
        pytest.param([SYNC, arrival(1), SYNCED, answer(1)], [False], id="begun-before"),
        pytest.param([arrival(1), OTHER_SYNC, answer(1)], [False], id="another-database"),
        pytest.param(
            [arrival(1), SYNC, SYNCED, answer(1), arrival(2), answer(2)], [True, False], id="once"
        ),
        pytest.param([*HALVES, SYNC, SYNCED, answer(1)], [True], id="read-in-two"),
    ],
)
def test_only_a_whole_sync_between_request_and_answer_counts(
    lines: list[str], acks: list[bool]
) -> None:
    trace = Trace(RUN)
    for line in lines:
        trace.take(line)
    assert trace.acks == acks


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        pytest.param({}, [], id="equal"),
        pytest.param({"version": 3}, ["optimizer steps applied more or less than once"]),
        pytest.param({"results": ["a", "c"]}, ["results that differ from the calm run"]),
        pytest.param({"results": ["a"]}, ["results that differ from the calm run"]),
        pytest.param({"files": {"f": "2"}}, ["files of weights and moments that differ"]),
    ],
)
def test_what_differs_from_the_calm_run_is_a_miss(
    changes: dict[str, object], missed: list[str]
) -> None:
    calm = Training(RUN, num_steps=2, version=2, results=["a", "b"], files={"f": "1"})
    disturbed = dataclasses.replace(calm, **changes)  # type: ignore[arg-type]
    assert [row.name for row in compare({"": calm}, {"": disturbed}) if row.is_missed] == missed


def test_what_was_not_measured_is_neither_a_pass_nor_a_miss() -> None:
    row = Row(name="x", value=None, target=0, note="strace is not installed")
    assert row.is_skipped
    assert not row.is_missed
