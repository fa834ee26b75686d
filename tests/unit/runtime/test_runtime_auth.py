from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import pytest
from tests.support.clock import Clock

from tinsmith_runtime.errors import (
    KeyInvalidError,
    KeyMissingError,
    KeyRevokedError,
    RoleMissingError,
    RunNotFoundError,
    UnavailableError,
)
from tinsmith_runtime.rpc.auth import (
    ApiKey,
    Authenticator,
    CachingKeyVerifier,
    Caller,
    bind_caller,
    current_caller,
)
from tinsmith_runtime.rpc.permissions import KeyRole
from tinsmith_runtime.rpc.pod_identity import PodRole

USER = Caller("p", KeyRole.MEMBER, "0123456789ab")


class FakeKeys:
    """Answers for keys, and counts the questions; waits while `gate` is cleared."""

    def __init__(self) -> None:
        self.answer: Caller | Exception = USER
        self.num_questions = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def verify(self, key_id: str, secret_sha256: bytes, check: str = "") -> Caller:
        self.num_questions += 1
        await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


# Keys.


def test_a_key_reads_back_and_hides_its_secret() -> None:
    key = ApiKey.generate()
    assert ApiKey.parse(str(key)) == key
    assert ApiKey.parse(key.tinker_spelling) == key
    assert key.tinker_spelling == f"tml-{key.key_id}_{key.secret}"
    assert key.secret_sha256 == hashlib.sha256(key.secret.encode()).digest()
    assert key.secret not in repr(key)


def test_keys_are_drawn_anew() -> None:
    assert len({ApiKey.generate() for _ in range(50)}) == 50


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: "", id="empty"),
        pytest.param(lambda text: text[:-1], id="too-short"),
        pytest.param(lambda text: text + "a", id="too-long"),
        pytest.param(lambda text: text + "\n", id="newline"),
        pytest.param(lambda text: " " + text, id="space"),
        pytest.param(lambda text: text.replace("tsk_", "sk_"), id="other-prefix"),
        pytest.param(lambda text: text.replace("_", "-", 2), id="other-separator"),
        pytest.param(lambda text: text.replace("tsk_", "tsk-"), id="mixed-prefix"),
        pytest.param(lambda text: text.replace("tsk_", "tml_"), id="other-mixed-prefix"),
        pytest.param(lambda text: text.replace("tsk_", "tml-tsk_"), id="both-prefixes"),
        pytest.param(lambda text: "tsk_" + "Ä" * 12 + text[16:], id="not-ascii"),
    ],
)
def test_what_is_not_a_key_is_refused(change: Callable[[str], str]) -> None:
    text = str(ApiKey.generate())
    with pytest.raises(KeyInvalidError, match="tsk_<id>_<secret>") as failure:
        ApiKey.parse(change(text))
    assert text[20:] not in failure.value.message


# Authentication.


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Basic abc", "tsk_x"])
async def test_a_call_without_a_bearer_key_is_refused(authorization: str | None) -> None:
    with pytest.raises(KeyMissingError, match="authorization: Bearer"):
        await Authenticator(FakeKeys(), roots=["root"]).authenticate(authorization)


async def test_a_user_key_is_verified_by_its_hash() -> None:
    key = ApiKey.generate()
    asked: list[tuple[str, bytes]] = []

    class Verifier:
        async def verify(self, key_id: str, secret_sha256: bytes, check: str = "") -> Caller:
            asked.append((key_id, secret_sha256))
            return USER

    caller = await Authenticator(Verifier(), roots=["root"]).authenticate(f"bearer {key}")
    assert caller == USER
    assert asked == [(key.key_id, key.secret_sha256)]


async def test_the_root_secret_itself_is_no_key() -> None:
    for root in ("root", "tsp_root"):
        with pytest.raises(KeyInvalidError):
            await Authenticator(FakeKeys(), roots=[root]).authenticate(f"Bearer {root}")


# Callers.


def missing() -> RunNotFoundError:
    return RunNotFoundError("no such run")


def test_callers_reach_their_own_project_and_pods_all() -> None:
    USER.require_project("p", missing)
    with pytest.raises(RunNotFoundError):
        USER.require_project("q", missing)
    Caller("", PodRole.SCHEDULER, "pod").require_project("q", missing)


def test_roles_are_required() -> None:
    USER.require_role(KeyRole.MEMBER, KeyRole.ADMIN)
    with pytest.raises(RoleMissingError) as failure:
        USER.require_role(KeyRole.ADMIN)
    assert failure.value.metadata == {"role": "member", "key_id": USER.key_id}


async def test_the_caller_belongs_to_the_task() -> None:
    async def serve(caller: Caller) -> Caller:
        bind_caller(caller)
        await asyncio.sleep(0)
        return current_caller()

    callers = [Caller(project, KeyRole.VIEWER, project) for project in "pq"]
    assert await asyncio.gather(*(asyncio.create_task(serve(c)) for c in callers)) == callers
    with pytest.raises(KeyMissingError):
        current_caller()


# Cached answers.


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def keys() -> FakeKeys:
    return FakeKeys()


@pytest.fixture
def verifier(keys: FakeKeys, clock: Clock) -> CachingKeyVerifier:
    return CachingKeyVerifier(keys.verify, ttl_s=2.0, clock=clock, max_entries=3)


async def test_an_answer_is_kept_for_its_time_and_no_longer(
    verifier: CachingKeyVerifier, keys: FakeKeys, clock: Clock
) -> None:
    assert await verifier.verify("id", b"hash") == USER
    keys.answer = KeyRevokedError("revoked")
    clock.now_s += 1.9
    assert await verifier.verify("id", b"hash") == USER
    clock.now_s += 0.1
    for _ in range(2):
        with pytest.raises(KeyRevokedError):
            await verifier.verify("id", b"hash")
    assert keys.num_questions == 2


async def test_the_time_counts_from_the_question(
    verifier: CachingKeyVerifier, keys: FakeKeys, clock: Clock
) -> None:
    keys.gate.clear()
    asking = asyncio.create_task(verifier.verify("id", b"hash"))
    while not keys.num_questions:
        await asyncio.sleep(0)
    clock.now_s += 3  # the answer is old when it arrives
    keys.gate.set()
    assert await asking == USER
    await verifier.verify("id", b"hash")
    assert keys.num_questions == 2


async def test_another_secret_is_another_question(
    verifier: CachingKeyVerifier, keys: FakeKeys
) -> None:
    await verifier.verify("id", b"hash")
    keys.answer = KeyInvalidError("wrong secret")
    with pytest.raises(KeyInvalidError):
        await verifier.verify("id", b"other")
    assert await verifier.verify("id", b"hash") == USER


async def test_calls_that_arrive_together_ask_once(
    verifier: CachingKeyVerifier, keys: FakeKeys
) -> None:
    keys.gate.clear()
    tasks = [asyncio.create_task(verifier.verify("id", b"hash")) for _ in range(5)]
    await asyncio.sleep(0)
    tasks[0].cancel()  # one caller that hangs up does not disturb the others
    keys.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1:] == [USER] * 4
    assert keys.num_questions == 1


async def test_an_unreachable_scheduler_is_not_kept(
    verifier: CachingKeyVerifier, keys: FakeKeys
) -> None:
    keys.answer = UnavailableError("gone")
    with pytest.raises(UnavailableError):
        await verifier.verify("id", b"hash")
    keys.answer = USER
    assert await verifier.verify("id", b"hash") == USER


async def test_of_too_many_answers_the_oldest_go(
    keys: FakeKeys, verifier: CachingKeyVerifier
) -> None:
    for number in range(10):
        await verifier.verify(f"id{number}", b"")
    assert keys.num_questions == 10
    for number in (7, 8, 9):
        await verifier.verify(f"id{number}", b"")
    assert keys.num_questions == 10
    await verifier.verify("id6", b"")
    assert keys.num_questions == 11


async def test_a_flood_of_unknown_keys_takes_no_good_answer_away(
    keys: FakeKeys, verifier: CachingKeyVerifier
) -> None:
    await verifier.verify("good", b"")
    keys.answer = KeyInvalidError("unknown")
    for number in range(50):
        with pytest.raises(KeyInvalidError):
            await verifier.verify(f"bad-{number}", b"")
    asked = keys.num_questions
    keys.answer = UnavailableError("not asked again")
    assert await verifier.verify("good", b"") == USER
    assert keys.num_questions == asked
