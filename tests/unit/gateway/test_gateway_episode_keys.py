"""The key of an episode is known to one of several coordinators."""

from __future__ import annotations

import pytest

from tinsmith.v1 import episode_pb2
from tinsmith_gateway.upstream.episode_keys import EpisodeKeys
from tinsmith_runtime.errors import (
    EpisodeEndedError,
    KeyInvalidError,
    TinsmithError,
    WorkerUnavailableError,
)


class Coordinators:
    """Coordinators by pool: what each answers to the key `tse-1`."""

    def __init__(self, **answers: TinsmithError | str) -> None:
        self.answers = {pool.removeprefix("shared"): answer for pool, answer in answers.items()}
        self.asked: list[str] = []
        self.keys = EpisodeKeys(self.pools, self.ask)

    async def pools(self) -> set[str]:
        return set(self.answers)

    async def ask(self, pool: str, key: str) -> episode_pb2.Episode:
        self.asked.append(pool)
        answer = self.answers[pool]
        if isinstance(answer, TinsmithError):
            raise answer
        return episode_pb2.Episode(name=answer)


UNKNOWN = KeyInvalidError("the key is unknown")
AWAY = WorkerUnavailableError("away")


async def test_the_coordinator_that_knew_a_key_is_asked_first() -> None:
    found = Coordinators(shared=UNKNOWN, a=AWAY, b="episode")
    for _ in range(2):
        episode, pool = await found.keys.verify("tse-1")
        assert (episode.name, pool) == ("episode", "b")
    assert found.asked == ["", "a", "b", "b"]


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({"shared": UNKNOWN, "a": UNKNOWN}, KeyInvalidError),
        ({"shared": UNKNOWN, "a": AWAY, "b": UNKNOWN}, WorkerUnavailableError),
        ({"shared": UNKNOWN, "a": EpisodeEndedError("over"), "b": UNKNOWN}, EpisodeEndedError),
    ],
    ids=["unknown", "perhaps-unknown", "ended"],
)
async def test_a_key_that_is_no_good(
    answers: dict[str, TinsmithError], error: type[TinsmithError]
) -> None:
    with pytest.raises(error):
        await Coordinators(**answers).keys.verify("tse-1")
