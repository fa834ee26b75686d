"""Projects take turns at the thread of masks, and samples that ended take none."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import pytest

from tinsmith_sampler.forms.mask_queue import MaskQueue

TIMEOUT_S = 60.0


@dataclass(eq=False)
class Work:
    """Notes that it was computed; waits for its gate first."""

    name: str
    computed: list[str]
    gate: threading.Event | None = None
    begun: threading.Event = field(default_factory=threading.Event)

    def compute(self) -> bool:
        self.begun.set()
        if self.gate is not None:
            assert self.gate.wait(TIMEOUT_S)
        self.computed.append(self.name)
        if self.name == "broken":
            raise ValueError(self.name)
        return self.name != "failed"


class Rig:
    """A queue whose thread is held up until all work of a test is in it."""

    def __init__(self) -> None:
        self.queue = MaskQueue()
        self.computed: list[str] = []
        self.gate = threading.Event()
        self.first = Work("first", self.computed, self.gate)
        self.work = [self.first]
        self.futures: list[Future[bool]] = [self.queue.submit("evil", self.first)]
        assert self.first.begun.wait(TIMEOUT_S)

    def submit(self, project: str, name: str) -> Future[bool]:
        work = Work(name, self.computed)
        self.work.append(work)
        self.futures.append(self.queue.submit(project, work))
        return self.futures[-1]

    def run(self) -> list[str]:
        self.gate.set()
        assert not wait(self.futures, TIMEOUT_S).not_done
        return self.computed


def test_a_project_waits_for_one_mask_of_another_at_most() -> None:
    rig = Rig()
    for number in range(100):
        rig.submit("evil", f"evil{number}")
    for number in range(3):
        rig.submit("good", f"good{number}")
    rig.submit("other", "other")
    computed = rig.run()
    assert computed[:8] == [
        "first", "evil0", "good0", "other", "evil1", "good1", "evil2", "good2",
    ]  # fmt: skip
    assert computed[8:] == [f"evil{number}" for number in range(3, 100)]


def test_what_a_caller_let_go_of_is_not_computed() -> None:
    rig = Rig()
    for number in range(5):
        rig.submit("evil", f"evil{number}")
    del rig.work[2:5], rig.futures[2:5]
    assert rig.run() == ["first", "evil0", "evil4"]


def test_what_fails_ends_its_own_future_alone() -> None:
    rig = Rig()
    broken, failed, good = (rig.submit("p", name) for name in ("broken", "failed", "good"))
    rig.run()
    with pytest.raises(ValueError, match="broken"):
        broken.result()
    assert not failed.result()
    assert good.result()
