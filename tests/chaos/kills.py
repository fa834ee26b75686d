"""Random `kill -9` over all pods and the database while three tenants train.

Every kill comes while operations are acknowledged and unfinished, which the ledger is asked. One
thing is kept from a trainer's next kill: an operation that two processes died with, because a third
death ends it by design.
"""

from __future__ import annotations

import collections
import random
import time

from tests.chaos.cluster import Pod
from tests.chaos.ledger_view import LedgerView, Unfinished
from tests.chaos.report import Findings, Row
from tests.chaos.scenario import Deployed, Setting, deployment
from tests.chaos.tenants import Tenant, Tenants, compare, reinforced, supervised

_DATABASE = "database"
_STARTING = "its start"
# Of eight kills; the order is random.
_ROUND = ("trainer",) * 4 + ("scheduler", "sampler", _DATABASE, _DATABASE)
_MAX_PAUSE_S = 0.4
_WAIT_S = 90.0
_POLL_S = 0.02
# Commits take a little longer, so that kills fall into them as well.
_SETTINGS = {
    "trainer": {"failpoints": "trainer.commit=sleep:0.01", "snapshot_replay_s": 2},
}


def run(setting: Setting) -> Findings:
    """Kill, and compare with a calm run of the same tenants."""
    with deployment(setting, settings=_SETTINGS) as deployed:
        tenants = Tenants(
            deployed.cluster,
            [
                Tenant("reading", supervised, 1),
                Tenant("writing", supervised, 2),
                Tenant("playing", reinforced, 3),
            ],
        )
        killer = Killer(setting, deployed, tenants)
        tenants.start()
        try:
            killer.kill_all()
        finally:
            disturbed = tenants.join()
        setting.say("the tenants have every result; now the calm run")
        calm = tenants.repeat(disturbed)
        view = LedgerView(deployed.postgres, deployed.database)
        rows = [
            Row(name="kills", value=killer.num_counted, target=setting.num_kills),
            *view.check([training.run for training in disturbed.values()]),
            *compare(calm, disturbed),
        ]
    return Findings(rows, killer.details())


class Killer:
    """Kills at random moments, each only while acknowledged operations are unfinished.

    Args:
        setting: How often, and from which seed.
        deployed: What is killed.
        tenants: Whose failure ends the killing.
    """

    def __init__(self, setting: Setting, deployed: Deployed, tenants: Tenants) -> None:
        self.num_counted = 0
        self._setting = setting
        self._cluster = deployed.cluster
        self._postgres = deployed.postgres
        self._view = LedgerView(deployed.postgres, deployed.database)
        self._tenants = tenants
        self._random = random.Random(setting.seed)
        self._phases: collections.Counter[str] = collections.Counter()
        self._num_queued = 0
        self._num_running = 0

    def kill_all(self) -> None:
        """Kill as often as the setting says."""
        while self.num_counted < self._setting.num_kills and not self._tenants.is_broken:
            targets = list(_ROUND)
            self._random.shuffle(targets)
            for target in targets[: self._setting.num_kills - self.num_counted]:
                self._kill(target)

    def details(self) -> dict[str, object]:
        """Return what was hit."""
        return {
            "killed, by pod and the failpoint it passed last": dict(sorted(self._phases.items())),
            "operations queued at the kills": self._num_queued,
            "operations running or committing at the kills": self._num_running,
        }

    def _kill(self, target: str) -> None:
        self._wait_ready()
        time.sleep(self._random.uniform(0.0, _MAX_PAUSE_S))
        unfinished = self._wait_unfinished()
        num_finished = self._view.num_finished()
        if target == _DATABASE:
            working = sorted({pod.phase for pod in self._cluster.trainers} - {""})
            phases = ",".join(working) or _STARTING
            self._postgres.kill()
            self._postgres.start()
        else:
            pod = self._wait_chosen(target)
            phases = pod.strike() or _STARTING
            unfinished = self._view.unfinished()
        if unfinished:
            self.num_counted += 1
            self._phases[f"{target} at {phases}"] += 1
            self._num_queued += unfinished.num_queued
            self._num_running += unfinished.num_running
            self._setting.say(f"kill {self.num_counted}: {target} at {phases}; {unfinished}")
        # Something is to finish between two kills.
        self._view.wait_finished(num_finished)

    def _wait_chosen(self, target: str) -> Pod:
        """Return a pod of a role; a trainer that is at work, not one that is starting."""
        if target == "scheduler":
            return self._cluster.scheduler
        if target == "sampler":
            return self._random.choice(self._cluster.samplers)
        end_s = time.monotonic() + _WAIT_S
        while True:
            holders = set(self._view.holders())
            trainers = [each for each in self._cluster.trainers if each.name in holders]
            working = [each for each in trainers if each.phase]
            if working:
                return self._random.choice(working)
            if time.monotonic() > end_s:
                raise TimeoutError("no trainer works on what is unfinished")
            time.sleep(_POLL_S)

    def _wait_ready(self) -> None:
        """Return once all pods run and no operation is one death away from being given up."""
        end_s = time.monotonic() + _WAIT_S
        while not self._tenants.is_broken:
            is_running = all(pod.is_running for pod in self._cluster.pods)
            if is_running and self._view.unfinished().max_attempts < 2:
                return
            if time.monotonic() > end_s:
                raise TimeoutError(f"not ready for a kill: {self._view.unfinished()}")
            time.sleep(_POLL_S)

    def _wait_unfinished(self) -> Unfinished:
        end_s = time.monotonic() + _WAIT_S
        while not self._tenants.is_broken:
            unfinished = self._view.unfinished()
            if unfinished and unfinished.max_attempts < 2:
                return unfinished
            if time.monotonic() > end_s:
                raise TimeoutError("the tenants have nothing to do")
        return self._view.unfinished()
