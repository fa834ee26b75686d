"""A standstill is told from a busy machine, by the times of threads."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.support.server_waits import ThreadTimes, own_times, slowness, times_of, waited_s

STANDS_S = 0.3
SERVER = f"""
import sys, time
for line in sys.stdin:
    if line == "works\\n":
        end = time.thread_time() + {STANDS_S}
        while time.thread_time() < end:
            pass
    elif line == "sleeps\\n":
        time.sleep({STANDS_S})
    print("done", flush=True)
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    ask(process, "nothing")
    yield process
    process.kill()
    process.communicate()


def ask(process: subprocess.Popen[str], what: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    before, own, begin_s = times_of(process.pid), own_times(), time.perf_counter()
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    process.stdout.readline()
    wall_s = time.perf_counter() - begin_s
    return waited_s(wall_s, times_of(process.pid), before, own_times().since(own))


@pytest.mark.parametrize("how", ["works", "sleeps"])
def test_a_planted_standstill_is_seen(server: subprocess.Popen[str], how: str) -> None:
    assert ask(server, how) >= 0.9 * STANDS_S


def test_what_other_programs_took_is_no_standstill() -> None:
    before = {1: ThreadTimes(5.0, 1.0), 2: ThreadTimes(3.0, 1.0)}
    after = {1: ThreadTimes(5.1, 2.0), 2: ThreadTimes(3.0, 1.6), 3: ThreadTimes(0.0, 0.1)}
    assert waited_s(2.0, after, before, ThreadTimes(0.0, 0.2)) == pytest.approx(0.1)
    # One thread that ran all the while, at a seventh of its speed.
    after = {1: ThreadTimes(6.0, 7.0), 2: ThreadTimes(3.0, 8.0)}
    assert waited_s(7.0, after, before, ThreadTimes(0.0, 0.2)) == pytest.approx(1.0)


def test_a_machine_is_as_fast_as_that_of_the_bounds_or_slower() -> None:
    assert slowness() >= 1.0
