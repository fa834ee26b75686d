"""Secrets, wake-ups and settings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tinsmith.rollouts import TerminationReason, Trajectory, Turn
from tinsmith.rollouts.trajectory_codec import decode_trajectory, encode_trajectory
from tinsmith.rpc.codec import encode_sampling_params
from tinsmith.sampling_stops import read_stops
from tinsmith.types import SamplingParams
from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_coordinator.episodes.lease_tokens import (
    EpisodeKey,
    LeaseToken,
    derive_secret,
    hash_secret,
    matches,
)
from tinsmith_coordinator.episodes.waiters import Bells
from tinsmith_coordinator.rpc.rollout_codec import decode_params
from tinsmith_runtime.errors import ConfigError, DrainingError, KeyInvalidError, LeaseLostError
from tinsmith_runtime.shielded import see_through

SALT = b"s" * 32
REQUEST = "5f0c3d0e-3f8a-4a39-9d8f-0c1b2a3d4e5f"


def test_secrets_of_an_attempt_are_made_again_and_told_apart() -> None:
    secret = derive_secret(SALT, REQUEST, "lease")
    assert secret == derive_secret(SALT, REQUEST, "lease")
    others = {
        derive_secret(SALT, REQUEST, "key"),
        derive_secret(b"t" * 32, REQUEST, "lease"),
        derive_secret(SALT, REQUEST.replace("5", "6"), "lease"),
    }
    assert secret not in others
    assert len(others) == 3
    assert matches(secret, hash_secret(secret))
    assert not matches(secret + "x", hash_secret(secret))


def test_tokens_and_keys_are_read_back_and_hide_their_secret() -> None:
    secret = derive_secret(SALT, REQUEST, "key")
    token = LeaseToken(3, secret)
    key = EpisodeKey("0" * 24, 12, secret)
    assert LeaseToken.parse(str(token)) == token
    assert EpisodeKey.parse(str(key)) == key
    assert secret not in repr(token) + repr(key)


@pytest.mark.parametrize("text", ["", "tsl-0-", f"tsl-0-{'a' * 43}", f"tsl-1-{'a' * 44}", "tse-"])
def test_other_texts_are_no_token(text: str) -> None:
    with pytest.raises(LeaseLostError):
        LeaseToken.parse(text)
    with pytest.raises(KeyInvalidError):
        EpisodeKey.parse(text)


async def test_a_bell_wakes_as_many_as_there_is_something_for() -> None:
    bells = Bells()
    first, second, third = (bells.listen("queue") for _ in range(3))
    bells.ring("queue")
    assert await first.wait(0)
    assert not await second.wait(0)
    bells.forget(second)
    bells.ring("queue", 5)
    assert await third.wait(0)
    assert not second.has_rung
    bells.ring("queue")
    # No listener was there: what comes later looks first.
    assert not await bells.listen("queue").wait(0)


async def test_closing_wakes_everybody_and_lets_nobody_in() -> None:
    bells = Bells()
    waiting = [asyncio.create_task(bells.listen(key).wait(60)) for key in ("a", "b")]
    await asyncio.sleep(0)
    bells.close()
    assert await asyncio.gather(*waiting) == [True, True]
    with pytest.raises(DrainingError):
        bells.listen("a")


async def test_a_change_is_seen_through_when_its_caller_is_gone() -> None:
    may_end = asyncio.Event()
    told: list[str] = []

    async def change() -> None:
        await may_end.wait()
        told.append("everybody")
        raise KeyInvalidError("which nobody asks for")

    caller = asyncio.create_task(see_through(change()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert told == ["everybody"]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_open_episodes": 0},
        {"retention_s": 3600.0},
        {"sweep_interval_s": float("inf")},
        {"max_trajectory_bytes": 60 * 2**20},
        {"drain_timeout_s": 0.0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        CoordinatorConfig(data_dir=tmp_path, **settings)


@pytest.mark.parametrize(
    ("params", "stop"),
    [
        ({}, None),
        ({"stop": "x"}, ["x"]),
        ({"stop": []}, []),
        ({"stop": ["x", 7]}, ["x", 7]),
        ({"stop": [7], "keeps_turn_end": True}, [7]),
        ({"stop": ["x"], "keeps_turn_end": False}, ["x"]),
        ({"keeps_turn_end": False}, []),
    ],
)
def test_where_a_sample_ends_is_what_the_client_said(
    params: dict[str, Any], stop: list[str | int] | None
) -> None:
    given = SamplingParams(**params, seed=3)
    read = decode_params(encode_sampling_params(given, seed=4))
    assert read.stop == stop
    assert read_stops(read) == read_stops(given)
    assert encode_sampling_params(read, seed=4) == encode_sampling_params(given, seed=4)


def test_a_trajectory_keeps_where_its_turns_end() -> None:
    turns = (Turn(1, "stop", stop=("x", 7)), Turn(2, "length"))
    played = Trajectory((), turns, TerminationReason.DONE)
    assert decode_trajectory(encode_trajectory(played)).turns == turns
