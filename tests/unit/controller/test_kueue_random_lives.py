"""Random lives of jobs in a queue of Kueue on a bad network, each from a seed.

Requests and answers are lost, watches lag, the controller is restarted, and Kueue decides at any
moment. Operators stop the queue and deactivate Workloads, authors edit and suspend. Whenever quota
is given back, nothing of the job runs. Once the faults end, every job comes to its end.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from tests.fakes.kueue_admitter import condition_of, is_true
from tests.unit.controller.cluster_in_memory import GPU, NAMESPACE, ApiError, Json
from tests.unit.controller.kueue_in_memory import QUOTA, KueueCluster

from tinsmith_controller.kueue.decision import Action, QueuedJob, WorkloadView, decide
from tinsmith_controller.owned_objects import RetryLaterError

NUM_BAD_STEPS = 160
NUM_QUIET_ROUNDS = 150
NAMES = "abc"


class RandomLife:
    """One life; `run` returns what was found that must not be."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.found: list[str] = []
        self.is_bad = True
        self.cluster = KueueCluster({"slow": {**QUOTA, GPU: "4"}, "fast": QUOTA})
        self.cluster.start(self.fault)
        self.world = self.cluster.world
        self.world.listeners.append(self.check_write)
        for priority, name in enumerate(("low", "high")):
            body = {"metadata": {"name": name}, "value": priority}
            self.world.create("workloadpriorityclasses", "", body)

    def run(self) -> list[str]:
        for name in NAMES:
            gpus = self.chance.choice((1, 2, 4))
            self.cluster.submit(name, gpus=gpus, priority=self.chance.choice(("", "low", "high")))
        for _ in range(NUM_BAD_STEPS):
            self.world.now_s += 0.25
            self.step()
        self.is_bad = False
        self.cluster.start()
        self.cluster.set_queue(is_stopped=False)
        for name in NAMES:
            if self.cluster.workloads(name):
                self.cluster.edit_workload(name, active=True)
        for _ in range(NUM_QUIET_ROUNDS):
            self.attempt(lambda: self.cluster.settle(1))
            for name in NAMES:
                self.cluster.end(name)
        self.check_end()
        return self.found

    def step(self) -> None:
        chance, process = self.chance, self.cluster.process
        for plural in process.watched:
            if chance.random() < 0.7:
                process.deliver(plural, chance.randint(1, 5))
        for key in sorted(process.due):
            process.due.discard(key)
            if not self.attempt(lambda key=key: process.reconciler.look(key)):
                process.due.add(key)
        self.attempt(process.assignment.decide)
        if chance.random() < 0.5:
            self.attempt(self.cluster.step_kueue)
        for pod in self.world.of("pods"):
            if chance.random() < 0.5:
                self.world.advance(pod)
        if chance.random() < 0.1:
            self.act(chance.choice(NAMES))
        if chance.random() < 0.02:
            self.cluster.start(self.fault)
        # As a controller looks at everything now and then, though nothing happened.
        if chance.random() < 0.1:
            process.due |= {record.item.key for record in process.caches.workloads()}

    def act(self, name: str) -> None:
        what = self.chance.choice(
            ("stop", "go", "deactivate", "activate", "size", "suspend", "pod")
        )
        if what in ("stop", "go"):
            self.cluster.set_queue(is_stopped=what == "stop")
        elif what in ("deactivate", "activate"):
            if self.cluster.workloads(name):
                self.cluster.edit_workload(name, active=what == "activate")
        elif what == "size":
            self.world.edit_trainer(name, replicas=self.chance.choice((1, 2)))
        elif what == "suspend":
            self.world.edit("trainingjobs", name, suspend=self.chance.random() < 0.5)
        elif pods := self.world.of("pods"):
            self.world.delete("pods", NAMESPACE, self.chance.choice(pods)["metadata"]["name"])

    def attempt(self, act: object) -> bool:
        """Do something that may fail as requests do; return whether it was done."""
        assert callable(act)
        try:
            act()
        except (ApiError, RetryLaterError):
            return False
        return True

    def fault(self, method: str, plural: str, name: str) -> str:
        if not self.is_bad or method == "GET" or self.chance.random() > 0.05:
            return ""
        return self.chance.choice(("request", "answer"))

    def check_write(self, plural: str, before: Json | None, after: Json) -> None:
        if plural != "workloads" or before is None:
            return
        was_released = is_true(before, "QuotaReserved") and not is_true(after, "QuotaReserved")
        job = after["metadata"]["ownerReferences"][0]["name"]
        if not was_released and not (
            is_true(after, "Finished") and not is_true(before, "Finished")
        ):
            return
        running = [
            pod["metadata"]["name"]
            for pod in self.world.of("pods")
            if pod["metadata"]["name"].startswith(f"{job}-") and pod["status"]["phase"] == "Running"
        ]
        if running:
            self.found.append(f"quota of {job} was given back while {running} run")

    def check_end(self) -> None:
        for name in NAMES:
            status = self.cluster.status(name)
            if status.get("phase") != "Succeeded":
                self.found.append(f"{name} is {status.get('phase')}: {status.get('waitingFor')}")
                continue
            told = [condition_of(self.cluster.workload(name), "Finished").get("reason")]
            if told != ["Succeeded"]:
                self.found.append(f"{name} is not finished for Kueue: {told}")


@pytest.mark.parametrize("first", range(0, 60, 5))
def test_nothing_is_found_in_lives(first: int) -> None:
    found = {seed: RandomLife(seed).run() for seed in range(first, first + 5)}
    assert {seed: each for seed, each in found.items() if each} == {}


def test_quota_that_is_given_back_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(job: QueuedJob, workload: WorkloadView | None) -> Action:
        return decide(dataclasses.replace(job, is_active=False), workload)

    monkeypatch.setattr("tinsmith_controller.kueue_queueing.decide", hasty)
    found = [problem for seed in range(3) for problem in RandomLife(seed).run()]
    assert any("was given back while" in problem for problem in found)
