"""One sampling session over two sampler processes, which are killed, drained and added."""

from __future__ import annotations

import logging
import os
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.integration.servers import BASE_MODEL, TIMEOUT_S, Deployment, bearer, pods
from tests.support.pods import PodProcess
from tests.support.wait import until

import tinsmith
from tinsmith.v1 import scheduler_pb2

NUM_KILLS = int(os.environ.get("TINSMITH_TEST_SAMPLER_KILLS", "3"))
NUM_CALLS = 24
NAMES = ("sampler", "sampler-1")
# A call that met a killed sampler is sent to the other one after a short pause. The bound is for a
# machine that is busy with other things.
MAX_CALL_S = 45.0

logger = logging.getLogger(__name__)

Pods = tuple[Deployment, dict[str, PodProcess]]


@pytest.fixture(params=["direct", "gateway"])
def running(request: pytest.FixtureRequest, tmp_path: Path, model_dir: Path) -> Iterator[Pods]:
    more = ("sampler-1", "gateway") if request.param == "gateway" else ("sampler-1",)
    with pods(tmp_path, model_dir, *more) as found:
        yield found


def params(seed: int) -> tinsmith.SamplingParams:
    return tinsmith.SamplingParams(max_tokens=64, seed=seed, stop=[])


def prompt(number: int) -> list[int]:
    return [number % 200 + 1] * 8


def addresses(deployment: Deployment, sampler: tinsmith.Sampler) -> list[str]:
    """Return where the samplers of a session are, as the scheduler says."""
    with deployment.scheduler_stub() as stub:
        found = stub.GetSamplingSession(
            scheduler_pb2.GetSamplingSessionRequest(name=sampler.name),
            metadata=bearer(deployment.api_key),
            timeout=TIMEOUT_S,
        )
    return list(found.sampler_addresses)


def num_sequences(process: PodProcess) -> float:
    """Return how many sequences a sampler has sampled to their end."""
    with urllib.request.urlopen(f"http://{process.metrics_address}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r"^tinsmith_sampler_sequences_total\{[^}]*\} (\S+)", text, re.MULTILINE)
    return sum(map(float, found))


class SampleLoad:
    """Calls and streams of one session, begun from several threads.

    Args:
        sampler: The session.
    """

    def __init__(self, sampler: tinsmith.Sampler) -> None:
        self._sampler = sampler
        self._pool = ThreadPoolExecutor(8)
        self.slowest_s = 0.0
        self.answered: set[tuple[str, str]] = set()

    def begin(self, numbers: range) -> list[Future[list[int]]]:
        """Begin a call, or a stream, for each number."""
        return [self._pool.submit(self._answer, number) for number in numbers]

    def close(self) -> None:
        """Wait for all that was begun."""
        self._pool.shutdown()

    def _answer(self, number: int) -> list[int]:
        begin_s = time.monotonic()
        if number % 2:
            found = self._sampler.sample(prompt(number), sampling_params=params(number)).result()
            tokens = found.sequences[0].tokens
            self.answered.add((found.sampler, found.sampler_choice))
        else:
            stream = self._sampler.stream(prompt(number), sampling_params=params(number))
            tokens = [token for piece in stream for token in piece.tokens]
            assert stream.result is not None
            self.answered.add((stream.result.sampler, stream.result.sampler_choice))
        self.slowest_s = max(self.slowest_s, time.monotonic() - begin_s)
        return list(tokens)


@pytest.fixture
def load(running: Pods) -> Iterator[SampleLoad]:
    deployment, _ = running
    with deployment.client() as client:
        sampler = client.create_sampler(base_model=BASE_MODEL)
        until(lambda: len(addresses(deployment, sampler)) == len(NAMES))
        # Opened anew, so that it knows both from the first call.
        load = SampleLoad(client.create_sampler(base_model=BASE_MODEL))
        yield load
        load.close()


@pytest.mark.timeout(120 + 30 * NUM_KILLS)
def test_one_session_uses_both_and_loses_nothing_when_they_are_killed(
    running: Pods, load: SampleLoad
) -> None:
    _, processes = running
    wanted = [one.result(TIMEOUT_S) for one in load.begin(range(NUM_CALLS))]
    assert min(num_sequences(processes[name]) for name in NAMES) >= NUM_CALLS / 6
    assert {name for name, _ in load.answered} == {"workers/sampler-0", "workers/sampler-1"}
    load.slowest_s = 0.0
    load.answered.clear()
    for index in range(NUM_KILLS):
        victim = processes[NAMES[index % 2]]
        other = processes[NAMES[1 - index % 2]]
        begun = load.begin(range(NUM_CALLS))
        _until_part_is_done(begun)
        before = num_sequences(other)
        victim.kill()
        assert [one.result(TIMEOUT_S) for one in begun] == wanted
        assert num_sequences(other) > before
        victim.start()
        until(lambda at=victim: at.is_listed)  # type: ignore[misc]
    logger.info("after %d kills the slowest call took %.2f s", NUM_KILLS, load.slowest_s)
    assert "failover" in {choice for _, choice in load.answered}
    assert load.slowest_s < MAX_CALL_S


def test_a_sampler_that_is_told_to_stop_finishes_and_gets_nothing_new(
    running: Pods, load: SampleLoad
) -> None:
    deployment, processes = running
    with deployment.client() as client:
        sampler = client.create_sampler(base_model=BASE_MODEL)
        wanted = [one.result(TIMEOUT_S) for one in load.begin(range(NUM_CALLS))]
        begun = load.begin(range(NUM_CALLS))
        _until_part_is_done(begun)
        processes["sampler-1"].terminate()
        # The listing goes first, long before a silent worker would be left out.
        until(lambda: len(addresses(deployment, sampler)) == 1, timeout_s=10)
        assert [one.result(TIMEOUT_S) for one in begun] == wanted
        processes["sampler-1"].wait()
        assert [one.result(TIMEOUT_S) for one in load.begin(range(NUM_CALLS))] == wanted
        # Scaled up again, it gets its part of what comes.
        processes["sampler-1"].start()
        until(lambda: len(addresses(deployment, sampler)) == len(NAMES))
        until(
            lambda: (
                [one.result(TIMEOUT_S) for one in load.begin(range(NUM_CALLS))] == wanted
                and num_sequences(processes["sampler-1"]) > 0
            )
        )


def _until_part_is_done(begun: list[Future[list[int]]]) -> None:
    until(lambda: sum(one.done() for one in begun) >= NUM_CALLS / 4)
