"""Tasks of tasksets, with tasksets of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tinsmith.environments.adapters.deadlines import Deadline
from tinsmith.environments.adapters.verifiers_tasks import choose

# A deadline for what hangs alone.
WAIT_S = 60.0


@dataclass(frozen=True)
class Config:
    id: str

    def model_dump_json(self) -> str:
        return self.id


@dataclass
class Loading:
    """A taskset of three tasks that loads once it may."""

    config: Config
    may_load: threading.Event = field(default_factory=threading.Event)
    loads: threading.Event = field(default_factory=threading.Event)
    bounded = True
    transform = None

    def __iter__(self) -> Iterator[str]:
        self.loads.set()
        assert self.may_load.wait(WAIT_S)
        return iter("abc")


def test_a_taskset_that_loads_keeps_no_other_waiting() -> None:
    slow, quick = Loading(Config("slow")), Loading(Config("quick"))
    quick.may_load.set()
    with ThreadPoolExecutor(2) as pool:
        try:
            waiting = pool.submit(choose, slow, 1, -1)
            assert slow.loads.wait(WAIT_S)
            assert pool.submit(choose, quick, 5, -1).result(WAIT_S) == "c"
            assert not waiting.done()
        finally:
            slow.may_load.set()
        assert waiting.result(WAIT_S) == "b"


def test_a_deadline_is_shared_and_passes_errors_on() -> None:
    with pytest.raises(ZeroDivisionError):
        Deadline(WAIT_S).run(lambda: 1 // 0, "dividing")
    assert Deadline(WAIT_S).run(lambda: 3, "three") == 3
    assert WAIT_S / 2 < Deadline(WAIT_S).left_s() <= WAIT_S
    late = threading.Event()
    over = Deadline(0.0)
    try:
        with pytest.raises(TimeoutError):
            over.run(late.wait, "waiting")
        assert over.left_s() == 0.0
    finally:
        late.set()
