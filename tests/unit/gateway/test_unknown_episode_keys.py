"""Unknown keys of episodes: remembered for a moment, and bounded by address."""

from __future__ import annotations

import pytest

from tinsmith.v1 import episode_pb2
from tinsmith_gateway.upstream.episode_keys import EpisodeKeys
from tinsmith_runtime.errors import KeyInvalidError, RateLimitedError, WorkerUnavailableError
from tinsmith_runtime.rpc.key_lookups import FailureLimit
from tinsmith_runtime.rpc.peers import bind_peer


class Coordinators:
    """Two of them; one has an episode."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_questions = 0
        self.is_away = False
        self.known = {"tse-good"}
        self.keys = EpisodeKeys(
            self.pools,
            self.ask,
            clock=lambda: self.now_s,
            failures=FailureLimit(at_once=5, clock=lambda: self.now_s),
        )
        bind_peer("192.0.2.1:5000")

    async def pools(self) -> set[str]:
        return {"", "a"}

    async def ask(self, pool: str, key: str) -> episode_pb2.Episode:
        self.num_questions += 1
        if self.is_away:
            raise WorkerUnavailableError("away")
        if pool == "a" and key in self.known:
            return episode_pb2.Episode(name="episode")
        raise KeyInvalidError("the key of the episode is unknown")


async def test_an_unknown_key_is_asked_about_once_in_a_while() -> None:
    found = Coordinators()
    for _ in range(10):
        with pytest.raises(KeyInvalidError):
            await found.keys.verify("tse-bad")
    assert found.num_questions == 2
    found.known.add("tse-bad")
    found.now_s += 2.1
    assert (await found.keys.verify("tse-bad"))[1] == "a"


async def test_a_flood_of_unknown_keys_is_bounded_and_delays_no_known_one() -> None:
    found = Coordinators()
    await found.keys.verify("tse-good")
    found.num_questions = 0
    for number in range(100):
        with pytest.raises((KeyInvalidError, RateLimitedError)):
            await found.keys.verify(f"tse-{number}")
    assert found.num_questions == 10
    assert (await found.keys.verify("tse-good"))[1] == "a"


async def test_that_none_answered_is_not_remembered() -> None:
    found = Coordinators()
    found.is_away = True
    for _ in range(20):
        with pytest.raises(WorkerUnavailableError):
            await found.keys.verify("tse-good")
    found.is_away = False
    assert (await found.keys.verify("tse-good"))[1] == "a"


async def test_the_key_of_a_deleted_episode_is_a_guess_again() -> None:
    found = Coordinators()
    await found.keys.verify("tse-good")
    found.known.clear()
    for _ in range(3):
        with pytest.raises(KeyInvalidError):
            await found.keys.verify("tse-good")
    assert found.num_questions == 4
