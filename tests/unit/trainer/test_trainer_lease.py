"""What a trainer makes of its lease: a decision by clocks, without a database."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.clock import Clock

from tinsmith_runtime.errors import StorageUnavailableError, UnavailableError
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_trainer.ownership.lease import Lease

TTL_S = 10.0


class SharedLedger:
    """A ledger that answers renewals; `during` is called while one is under way."""

    is_shared = True

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.is_away = False
        self.during: Any = lambda: None

    async def renew(self, ttl_s: float, among: Collection[str]) -> dict[str, int]:
        assert ttl_s == TTL_S
        held = {run: epoch for run, epoch in self.held.items() if run in among}
        self.during()
        if self.is_away:
            raise StorageUnavailableError("away")
        return held


def make_run(name: str, **changes: Any) -> Any:
    return SimpleNamespace(**{"name": name, "is_staying": True, **changes})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger() -> SharedLedger:
    return SharedLedger()


@pytest.fixture
def runs() -> dict[str, Any]:
    return {}


@pytest.fixture
def keeper(ledger: Any, runs: dict[str, Any], clock: Clock) -> Lease:
    return Lease(ledger, runs, ttl_s=TTL_S, clock=clock)


async def test_a_lease_is_believed_in_for_six_tenths_of_its_life(
    keeper: Lease, clock: Clock
) -> None:
    assert not keeper.is_current
    await keeper.renew()
    for elapsed_s, is_current in ((0.0, True), (5.9, True), (6.1, False), (9.0, False)):
        clock.now_s = 100.0 + elapsed_s
        assert keeper.is_current is is_current
    with pytest.raises(UnavailableError):
        keeper.require()
    assert "lease" in keeper.obstacle()


async def test_the_life_of_a_lease_begins_before_the_renewal_was_sent(
    keeper: Lease, ledger: SharedLedger, clock: Clock
) -> None:
    def take_long() -> None:
        clock.now_s += 7.0

    ledger.during = take_long
    await keeper.renew()
    assert not keeper.is_current


async def test_a_renewal_that_fails_changes_nothing(
    keeper: Lease, ledger: SharedLedger, clock: Clock
) -> None:
    await keeper.renew()
    ledger.is_away = True
    clock.now_s += 3.0
    with pytest.raises(StorageUnavailableError):
        await keeper.renew()
    assert keeper.is_current
    clock.now_s += 4.0
    assert not keeper.is_current
    ledger.is_away = False
    await keeper.renew()
    assert keeper.is_current


async def test_who_waits_for_the_lease_goes_on_after_a_late_renewal(
    keeper: Lease, clock: Clock
) -> None:
    waiting = asyncio.create_task(keeper.wait_current())
    await asyncio.sleep(0)
    assert not waiting.done()
    await keeper.renew()
    await waiting


async def test_a_run_that_somebody_else_holds_ends_the_process(
    keeper: Lease, ledger: SharedLedger, runs: dict[str, Any]
) -> None:
    runs.update({name: make_run(name) for name in ("mine", "taken")})
    ledger.held = {"mine": 3}
    with pytest.raises(FencedError, match="taken"):
        await keeper.renew()
    assert not keeper.is_current


async def test_a_run_that_came_or_went_during_the_renewal_is_not_missed(
    keeper: Lease, ledger: SharedLedger, runs: dict[str, Any]
) -> None:
    runs["gone"] = make_run("gone")
    runs["again"] = make_run("again")
    runs["leaving"] = make_run("leaving", is_staying=False)

    def change() -> None:
        del runs["gone"]
        runs["again"] = make_run("again")
        runs["new"] = make_run("new")

    ledger.during = change
    await keeper.renew()
    assert keeper.is_current
