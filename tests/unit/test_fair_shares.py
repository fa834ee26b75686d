"""Four keys of one project beside one key of another, both wanting all there is: equal shares."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tinsmith_engine.files.weight_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tinsmith_runtime.errors import RateLimitedError, ResourceExhaustedError
from tinsmith_runtime.fairness.fair_slots import FairSlots
from tinsmith_runtime.ledger import StoredFile
from tinsmith_runtime.rpc.in_flight import AdmittedRequest, Limits, LimitSettings
from tinsmith_trainer.checkpoints.uploads import Upload, Uploads

KEYS = [*(("many", f"m{number}") for number in range(4)), ("one", "o0")]
"""Project and key."""
ROUNDS, LIFE = 1000, 50.0
"""Rounds in which all ask, and how many of them a call takes."""


def assert_equal_shares(got: Counter[str]) -> None:
    """Hold that none has over ten percent more than another."""
    assert set(got) == {"many", "one"}
    assert max(got.values()) <= 1.1 * min(got.values()), got


Ask = Callable[[Limits, str], AdmittedRequest]


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda limits, project: limits.admit(project), id="calls"),
        pytest.param(lambda limits, project: limits.admit(project, is_wait=True), id="polls"),
        pytest.param(lambda limits, project: limits.admit(project, num_bytes=10), id="bytes"),
    ],
)
@pytest.mark.parametrize("num_asks", [10, 2], ids=["often", "seldom"])
def test_what_is_in_flight(ask: Ask, num_asks: int) -> None:
    """Each key asks again when it is refused, most of them far oftener than a call ends."""
    chance = random.Random(0)
    limits = Limits(LimitSettings(max_requests=140, max_waits=140, max_bytes=1400))
    running: list[tuple[float, int, AdmittedRequest]] = []
    got: Counter[str] = Counter()
    asks = [project for project, _ in KEYS for _ in range(10 if project == "many" else num_asks)]
    for turn in range(ROUNDS):
        while running and running[0][0] <= turn:
            limits.release(heapq.heappop(running)[2])
        chance.shuffle(asks)
        for project in asks:
            with contextlib.suppress(RateLimitedError):
                admission = ask(limits, project)
                end = turn + 1 + chance.expovariate(1 / LIFE)
                heapq.heappush(running, (end, got.total(), admission))
                got[project] += 1
    assert_equal_shares(got)


def test_one_that_comes_late_has_its_part_as_soon_as_places_come_free() -> None:
    """The polls of the first end all at once, and it would have all of them again."""
    limits = Limits(LimitSettings(max_waits=48))
    first = _fill(limits, "many")
    assert len(first) == 36
    assert len(_fill(limits, "one")) == 12
    for poll in first:
        limits.release(poll)
        with contextlib.suppress(RateLimitedError):
            limits.admit("many", is_wait=True)
        _fill(limits, "one")
    held = [limits.in_flight_of(project).num_waits for project in ("many", "one")]
    assert max(held) - min(held) <= 1, held


def _fill(limits: Limits, project: str) -> list[AdmittedRequest]:
    polls = []
    with contextlib.suppress(RateLimitedError):
        while True:
            polls.append(limits.admit(project, is_wait=True))
    return polls


async def test_places_to_compile_a_form() -> None:
    slots = FairSlots(2, 1)
    got: Counter[str] = Counter()
    ended = asyncio.Event()

    async def compile_forms(project: str) -> None:
        while not ended.is_set():
            async with slots.hold(project):
                got[project] += 1
                # Much longer than the hand-over of a place.
                for _ in range(50):
                    await asyncio.sleep(0)
                if got.total() >= ROUNDS:
                    ended.set()

    await asyncio.gather(*(compile_forms(project) for project, _ in KEYS))
    assert_equal_shares(got)


def test_bytes_of_uploads(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, max_bytes=100, max_project_bytes=500, clock=lambda: 0.0)
    got: Counter[str] = Counter()
    for number in range(20):
        for project, key in KEYS:
            files = (
                StoredFile(name=ADAPTER_CONFIG_FILE, size_bytes=1, sha256="0" * 64),
                StoredFile(name=ADAPTER_FILE, size_bytes=99, sha256="0" * 64),
            )
            run = f"projects/{project}/trainingRuns/r"
            upload = Upload(
                name=f"{run}/checkpointUploads/{key}-{number}",
                checkpoint=f"{run}/checkpoints/c",
                files=files,
                labels={},
                ttl_s=None,
                digest="d",
            )
            with contextlib.suppress(ResourceExhaustedError):
                uploads.create(upload)
                got[project] += sum(file.size_bytes for file in files)
    assert_equal_shares(got)
