"""Writes of several projects take turns, in groups of bounded time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from tinsmith_runtime.sql import SqliteDatabase
from tinsmith_runtime.sql.fair_groups import FairGroups
from tinsmith_runtime.tenant import bind_tenant, current_tenant


def slow(groups: FairGroups[str]) -> FairGroups[str]:
    """Return groups of sixteen writes."""
    groups.note(1, writes_s=1.0, commit_s=0.0)
    return groups


def test_a_lone_write_is_a_group() -> None:
    groups: FairGroups[str] = FairGroups()
    assert not groups
    groups.add("a", ["a1"])
    assert groups
    assert groups.take() == ["a1"]
    assert groups.take() == []


def test_one_project_is_served_in_order() -> None:
    groups: FairGroups[str] = FairGroups()
    for name in "abcdefghij":
        groups.add("p", [name])
    assert groups.take() == list("abcdefghij")


def test_projects_take_turns() -> None:
    groups = slow(FairGroups())
    for number in range(40):
        groups.add("loud", [f"loud {number}"])
    groups.add("quiet", ["quiet 0"])
    groups.add("quiet", ["quiet 1"])
    first = groups.take()
    assert len(first) == 16
    assert [write for write in first if "quiet" in write] == ["quiet 0", "quiet 1"]
    assert first.index("quiet 1") <= 3


def test_a_large_write_counts_as_what_it_is() -> None:
    groups = slow(FairGroups())
    groups.add("large", [f"large {number}" for number in range(14)])
    groups.add("large", ["later"])
    for number in range(3):
        groups.add("small", [f"small {number}"])
    assert groups.take() == [*(f"large {number}" for number in range(14)), "small 0", "small 1"]
    assert groups.take() == ["small 2", "later"]


def test_what_belongs_together_is_not_cut() -> None:
    groups = slow(FairGroups())
    groups.add("a", [f"a{number}" for number in range(30)])
    assert len(groups.take()) == 30


def test_a_project_that_was_idle_saves_nothing_up() -> None:
    groups = slow(FairGroups())
    for number in range(90):
        groups.add("busy", [f"busy {number}"])
    for _ in range(3):
        groups.take()
    for number in range(20):
        groups.add("idle", [f"idle {number}"])
    group = groups.take()
    assert sum("idle" in write for write in group) == 8


def test_work_of_no_project_goes_first() -> None:
    groups = slow(FairGroups())
    for number in range(20):
        groups.add("loud", [f"loud {number}"])
    groups.add("", ["commit"])
    assert groups.take()[0] == "commit"


@pytest.mark.parametrize(
    ("write_s", "commit_s", "size"),
    [
        (1e-6, 0.0, 256),
        (4e-4, 0.01, 50),
        (4e-4, 0.04, 100),
        (1e-3, 0.0, 20),
        (1.0, 0.0, 16),
    ],
    ids=str,
)
def test_groups_are_as_large_as_writes_are_fast(write_s: float, commit_s: float, size: int) -> None:
    groups: FairGroups[int] = FairGroups()
    groups.note(4, writes_s=4 * write_s, commit_s=commit_s)
    for number in range(1000):
        groups.add("p", [number])
    assert len(groups.take()) == pytest.approx(size, abs=1)


def test_nothing_is_lost_and_each_project_keeps_its_order() -> None:
    groups = slow(FairGroups())
    for number in range(100):
        groups.add(f"p{number % 7}" if number % 10 else "", [str(number)])
    found: list[str] = []
    while group := groups.take():
        found += group
    assert sorted(found, key=int) == [str(number) for number in range(100)]
    for project in range(7):
        mine = [int(n) for n in found if int(n) % 7 == project and int(n) % 10]
        assert mine == sorted(mine)


async def test_a_write_does_not_wait_for_the_crowd_of_another(tmp_path: Path) -> None:
    table = sa.Table("t", sa.MetaData(), sa.Column("x", sa.Integer))
    database = SqliteDatabase(tmp_path / "a.sqlite", table.metadata, schema_version=1)
    has_begun, may_go = threading.Event(), threading.Event()
    order: list[str] = []

    def hold(_: sa.Connection) -> None:
        has_begun.set()
        may_go.wait(10)

    async def write(project: str) -> None:
        bind_tenant(project)
        await database.write(lambda _: order.append(project))

    try:
        first = asyncio.create_task(database.write(hold))
        assert await asyncio.to_thread(has_begun.wait, 10)
        crowd = [asyncio.create_task(write("loud")) for _ in range(300)]
        quiet = asyncio.create_task(write("quiet"))
        # All of them are queued once each task has run up to its write.
        await asyncio.sleep(0)
        may_go.set()
        await asyncio.gather(first, quiet, *crowd)
    finally:
        await database.close()
    assert len(order) == 301
    assert order.index("quiet") <= 2
    assert current_tenant() == ""
