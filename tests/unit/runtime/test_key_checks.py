"""Checks at the end of keys: what they are made of, and how seldom their secrets are asked for."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import pytest

from tinsmith_runtime.errors import KeyInvalidError, RateLimitedError, UnavailableError
from tinsmith_runtime.rpc.auth import ApiKey, CachingKeyVerifier, Caller, derive_job_key
from tinsmith_runtime.rpc.key_checks import KeyChecks, check_secret
from tinsmith_runtime.rpc.key_lookups import FailureLimit
from tinsmith_runtime.rpc.peers import bind_peer
from tinsmith_runtime.rpc.permissions import KeyRole

USER = Caller("p", KeyRole.MEMBER, "good")
ROOT = "root"


class Scheduler:
    """Knows the keys that a test gives it, and the secrets of the checks."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.roots = [ROOT]
        self.known: set[str] = set()
        self.num_questions = 0
        self.num_asked_secrets = 0
        self.is_away = False
        self.verifier = CachingKeyVerifier(
            self.ask,
            checks=KeyChecks(self.secrets, clock=lambda: self.now_s),
            failures=FailureLimit(at_once=5, clock=lambda: self.now_s),
            clock=lambda: self.now_s,
        )
        bind_peer("192.0.2.1:5000")

    async def ask(self, key_id: str, secret_sha256: bytes) -> Caller:
        self.num_questions += 1
        if key_id not in self.known:
            raise KeyInvalidError("unknown")
        return USER

    async def secrets(self) -> Sequence[str]:
        self.num_asked_secrets += 1
        if self.is_away:
            raise UnavailableError("away")
        return [check_secret(root) for root in self.roots]

    def new_key(self, root: str = ROOT) -> ApiKey:
        key = ApiKey.generate().checked(root)
        self.known.add(key.key_id)
        return key

    async def verify(self, key: ApiKey) -> Caller:
        return await self.verifier.verify(key.key_id, key.secret_sha256, key.check)

    async def flood(self) -> None:
        for _ in range(50):
            with pytest.raises((KeyInvalidError, RateLimitedError)):
                await self.verify(ApiKey.generate().checked("another root"))


def test_the_derivation_is_that_of_the_chart() -> None:
    def code(secret: str, text: str) -> str:
        inner = hashlib.sha256(f"{secret}\n{text}".encode()).hexdigest()
        return hashlib.sha256(f"{secret}\n{inner}".encode()).hexdigest()

    key = ApiKey.generate()
    hashed = hashlib.sha256(key.secret.encode()).hexdigest()
    secret = code(ROOT, "tinsmith key check")
    assert key.checked(ROOT).check == code(secret, f"{key.key_id}\n{hashed}")[:12]


def test_a_checked_key_reads_back_and_is_the_same_key() -> None:
    key = ApiKey.generate()
    checked = ApiKey.parse(str(key.checked(ROOT)))
    assert checked == ApiKey.parse(key.checked(ROOT).tinker_spelling) == key.checked(ROOT)
    assert (checked.key_id, checked.secret_sha256) == (key.key_id, key.secret_sha256)
    assert derive_job_key(ROOT, "uid").check


async def test_a_flood_of_unknown_keys_keeps_out_those_without_a_check_alone() -> None:
    scheduler = Scheduler()
    await scheduler.flood()
    assert scheduler.num_questions == 5
    assert await scheduler.verify(scheduler.new_key()) == USER
    with pytest.raises(RateLimitedError):
        await scheduler.verify(ApiKey.generate())
    old = scheduler.new_key()
    with pytest.raises(RateLimitedError):
        await scheduler.verify(ApiKey(old.key_id, old.secret))
    scheduler.now_s += 10.0
    assert await scheduler.verify(ApiKey(old.key_id, old.secret)) == USER


async def test_a_check_is_of_one_id_and_one_secret() -> None:
    scheduler = Scheduler()
    key, other = scheduler.new_key(), scheduler.new_key()
    await scheduler.flood()
    for forged in (
        ApiKey(other.key_id, key.secret, key.check),
        ApiKey(key.key_id, other.secret, key.check),
    ):
        with pytest.raises(RateLimitedError):
            await scheduler.verify(forged)


async def test_a_flood_asks_for_the_secrets_once_a_minute() -> None:
    scheduler = Scheduler()
    await scheduler.flood()
    await asyncio.gather(scheduler.flood(), scheduler.flood())
    assert scheduler.num_asked_secrets == 1
    scheduler.now_s += 61.0
    await scheduler.flood()
    assert scheduler.num_asked_secrets == 2


async def test_a_check_of_a_new_root_is_right_once_the_secrets_were_asked_for_again() -> None:
    scheduler = Scheduler()
    await scheduler.verify(scheduler.new_key())
    scheduler.roots = ["new", ROOT]
    scheduler.now_s += 61.0
    await scheduler.flood()
    scheduler.now_s += 61.0
    assert await scheduler.verify(scheduler.new_key("new")) == USER
    assert await scheduler.verify(scheduler.new_key()) == USER


async def test_a_key_is_told_that_the_scheduler_is_away_and_is_not_counted() -> None:
    scheduler = Scheduler()
    scheduler.is_away = True
    for _ in range(20):
        with pytest.raises(UnavailableError):
            await scheduler.verify(scheduler.new_key())
    scheduler.is_away = False
    assert await scheduler.verify(scheduler.new_key()) == USER
