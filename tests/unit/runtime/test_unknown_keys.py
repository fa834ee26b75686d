"""How many unknown keys an address may try: what it costs others, and what it does not."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tinsmith_runtime.errors import KeyInvalidError, RateLimitedError, UnavailableError
from tinsmith_runtime.rpc.auth import CachingKeyVerifier, Caller
from tinsmith_runtime.rpc.key_lookups import FailureLimit
from tinsmith_runtime.rpc.peers import address_of, bind_peer, network_of
from tinsmith_runtime.rpc.permissions import KeyRole

USER = Caller("p", KeyRole.MEMBER, "good")
ATTACKER, OTHER = "192.0.2.1:5000", "192.0.2.2:5000"


class Scheduler:
    """Knows one key."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_questions = 0
        self.is_away = False
        self.verifier = CachingKeyVerifier(
            self.ask,
            clock=lambda: self.now_s,
            failures=FailureLimit(at_once=5, per_s=2.0, clock=lambda: self.now_s),
        )

    async def ask(self, key_id: str, secret_sha256: bytes) -> Caller:
        self.num_questions += 1
        if self.is_away:
            raise UnavailableError("away")
        if key_id.startswith("good"):
            return USER
        raise KeyInvalidError("unknown")

    async def try_unknown(self, number: int) -> int:
        """Return how many of so many unknown keys were asked about."""
        before = self.num_questions
        for index in range(number):
            with pytest.raises((KeyInvalidError, RateLimitedError)):
                await self.verifier.verify(f"bad-{self.now_s}-{index}", b"")
        return self.num_questions - before


@pytest.fixture
def scheduler() -> Scheduler:
    bind_peer(ATTACKER)
    return Scheduler()


async def test_random_keys_of_an_address_are_few_calls(scheduler: Scheduler) -> None:
    assert await scheduler.try_unknown(100) == 5
    with pytest.raises(RateLimitedError, match="check the key") as caught:
        await scheduler.verifier.verify("bad", b"")
    assert caught.value.retry_after_s == pytest.approx(0.5)
    assert caught.value.metadata["what"] == "unknown keys"
    scheduler.now_s += 1.0
    assert await scheduler.try_unknown(100) == 2


async def test_another_address_tries_its_own(scheduler: Scheduler) -> None:
    await scheduler.try_unknown(100)
    bind_peer(OTHER)
    assert await scheduler.verifier.verify("good", b"") == USER
    assert await scheduler.try_unknown(100) == 5


async def test_a_key_that_was_good_is_asked_about_beside_a_flood(scheduler: Scheduler) -> None:
    await scheduler.verifier.verify("good", b"")
    for _ in range(5):
        scheduler.now_s += 10.0
        await scheduler.try_unknown(100)
        assert await scheduler.verifier.verify("good", b"") == USER


async def test_a_revoked_key_is_a_guess_again(scheduler: Scheduler) -> None:
    await scheduler.verifier.verify("good", b"")

    async def revoked(key_id: str, secret_sha256: bytes) -> Caller:
        raise KeyInvalidError("unknown")

    verifier = CachingKeyVerifier(
        revoked, clock=lambda: scheduler.now_s, failures=FailureLimit(at_once=1)
    )
    with pytest.raises(KeyInvalidError):
        await verifier.verify("good", b"")
    scheduler.now_s += 10.0
    with pytest.raises(RateLimitedError):
        await verifier.verify("good", b"")


async def test_good_keys_and_an_absent_scheduler_use_nothing_up(scheduler: Scheduler) -> None:
    for number in range(50):
        assert await scheduler.verifier.verify(f"good-{number}", b"") == USER
    scheduler.is_away = True
    for number in range(50):
        with pytest.raises(UnavailableError):
            await scheduler.verifier.verify(f"good-too-{number}", b"")
    scheduler.is_away = False
    assert await scheduler.try_unknown(100) == 5


async def test_many_at_once_are_bounded_too(scheduler: Scheduler) -> None:
    answers = await asyncio.gather(
        *(scheduler.verifier.verify(f"bad-{index}", b"") for index in range(50)),
        return_exceptions=True,
    )
    assert scheduler.num_questions == 5
    assert sum(isinstance(answer, RateLimitedError) for answer in answers) == 45


async def test_a_refusal_that_no_call_waits_for_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stranger that hangs up would else write a trace into the log with each key."""
    asked, answer, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def ask(key_id: str, secret_sha256: bytes) -> Caller:
        asked.set()
        await answer.wait()
        asyncio.get_running_loop().call_soon(answered.set)
        raise KeyInvalidError("unknown")

    verifier = CachingKeyVerifier(ask)
    call = asyncio.create_task(verifier.verify("bad", b""))
    await asked.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    answer.set()
    await answered.wait()
    await asyncio.sleep(0)
    del call
    gc.collect()
    assert "never retrieved" not in caplog.text
    with pytest.raises(KeyInvalidError):
        await verifier.verify("bad", b"")


def test_addresses_are_bounded() -> None:
    limit = FailureLimit(at_once=1, max_addresses=2, clock=lambda: 0.0)
    for host in "abc":
        limit.take(f"{host}:1")
    with pytest.raises(RateLimitedError):
        limit.take("b:1")
    limit.take("a:1")  # forgotten: the oldest of three


@pytest.mark.parametrize(
    ("peer", "address", "network"),
    [
        ("ipv4:192.0.2.1:5000", "192.0.2.1:5000", "192.0.2.1"),
        ("ipv6:%5B2001:db8::1:2%5D:5000", "[2001:db8::1:2]:5000", "2001:db8::/64"),
        ("unix-abstract:tinsmith/x/7/192.0.2.1:5000", "192.0.2.1:5000", "192.0.2.1"),
        ("unix-abstract:tinsmith/x/7/%5B::ffff:192.0.2.1%5D:50", "[::ffff:192.0.2.1]:50", None),
        ("unix:", "", ""),
    ],
)
def test_the_address_of_a_peer(peer: str, address: str, network: str | None) -> None:
    assert address_of(peer) == address
    assert network_of(address) == ("192.0.2.1" if network is None else network)
