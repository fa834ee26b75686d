"""A kill at every named point of the code, one after another, while a tenant does everything.

A name in the present tense stands before something takes effect, its past tense behind it. Each
kill is the work of the process itself, so it strikes exactly there. The pod is started again each
time with the next point; the tenant only retries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable

from tests.chaos.cluster import BASE_MODEL, Cluster, Pod
from tests.chaos.ledger_view import LedgerView
from tests.chaos.report import Findings, Row
from tests.chaos.scenario import Setting, deployment
from tests.chaos.tenants import Tenant, Tenants, Training, compare, supervised
from tests.chaos.tour import tour
from tinsmith_runtime import failpoints

# The passing that kills. Of what happens in every cycle a later one, so that an operation that died
# before is finished first: a third death would end it.
_NUM_PASSINGS = {
    "trainer.commit": 3,
    "trainer.committed": 3,
    "trainer.compute": 3,
    "trainer.computed": 3,
    "trainer.intend": 3,
    "trainer.intended": 3,
    "trainer.renew": 4,
    "trainer.renewed": 4,
    "trainer.submit": 3,
    "trainer.submitted": 3,
    "sampler.sample": 2,
    "sampler.sampled": 2,
}
_CI_NAMES = (
    "trainer.submitted",
    "trainer.commit",
    "trainer.committed",
    "trainer.adopted",
    "trainer.replayed",
    "trainer.snapshot_written",
    "trainer.loaded",
    "trainer.deleted",
    "sampler.loaded",
    "scheduler.adopted",
    "scheduler.moving",
)
_HAND_OVER = frozenset({"trainer.hand_over", "trainer.handed_over"})
# Struck where there is a cluster: tests/e2e/test_controller_crashes.py.
_OF_CLUSTERS = frozenset({"controller.write", "controller.wrote"})
_LEAVING = frozenset({"trainer.leave", "trainer.left"})
_RESTORING = frozenset({"trainer.replay", "trainer.replayed"})
_RELEASING = frozenset({"scheduler.release", "scheduler.released"})
_MOVING = frozenset({"scheduler.move", "scheduler.moving"})
_GONE = '"event": "a trainer is gone"'
_KILLED = -signal.SIGKILL
_WAIT_S = 300.0
_NUM_ROUNDS = 10
_POLL_S = 0.05
# Snapshots often, so that every part of a restore is passed.
_SETTINGS = {"trainer": {"snapshot_replay_s": 0.2}}


def run(setting: Setting) -> Findings:
    """Strike every point, or in the short size those that matter most."""
    wanted = failpoints.NAMES if setting.is_long else frozenset(_CI_NAMES)
    names = sorted(wanted - _HAND_OVER - _OF_CLUSTERS)
    struck: list[str] = []
    with deployment(setting, num_trainers=1, settings=_SETTINGS) as deployed:
        tenants = Tenants(deployed.cluster, [Tenant("touring", tour, 5)])
        tenants.start()
        try:
            for name in names:
                if not tenants.is_broken and _strike(deployed.cluster, name):
                    struck.append(name)
                    setting.say(f"struck {name}")
        finally:
            disturbed = tenants.join()
        setting.say("the tenant has every result; now the calm run")
        calm = tenants.repeat(disturbed)
        view = LedgerView(deployed.postgres, deployed.database)
        missed = sorted(set(names) - set(struck))
        rows = [
            Row(name="points that were struck", value=len(struck), target=len(names)),
            *view.check([training.run for training in disturbed.values()]),
            *compare(calm, disturbed),
        ]
    if setting.is_long:
        rows += _strike_hand_overs(setting, struck)
    details: dict[str, object] = {"struck": struck}
    if missed:
        details["not passed in time"] = missed
    return Findings(rows, details)


def _strike_hand_overs(setting: Setting, struck: list[str]) -> list[Row]:
    """Have a trainer die while it hands a run over that the scheduler thought lost.

    That takes a trainer which is silent for too long for the scheduler and not for its lease.
    """
    settings = {"trainer": {"lease_ttl_s": 12}}
    part = dataclasses.replace(setting, folder=setting.folder / "hand_over")
    with deployment(part, num_samplers=0, settings=settings) as deployed:
        names = sorted(_HAND_OVER)
        tenants = Tenants(deployed.cluster, [Tenant(f"leaving-{n}", supervised, n) for n in (6, 7)])
        view = LedgerView(deployed.postgres, deployed.database)
        disturbed: dict[str, Training] = {}
        for number, name in enumerate(names):
            for pod in deployed.cluster.trainers:
                _arm(pod, name)
            tenants.start(number)
            try:
                _silence_holder(deployed.cluster, view)
                struck.append(name)
                setting.say(f"struck {name}")
            finally:
                disturbed.update(tenants.join())
        calm = tenants.repeat(disturbed)
        return [
            dataclasses.replace(row, name=f"hand-over: {row.name}")
            for row in (
                *view.check([training.run for training in disturbed.values()]),
                *compare(calm, disturbed),
            )
        ]


def _silence_holder(cluster: Cluster, view: LedgerView) -> None:
    """Stop the trainer that works until the scheduler moves its run; have it die thereafter."""
    view.wait_finished(view.num_finished())
    _wait_for(lambda: len(view.holders()) == 1, "no trainer holds the run")
    [holder] = [pod for pod in cluster.trainers if [pod.name] == view.holders()]
    num_moves = cluster.scheduler.log.read_text().count(_GONE)
    num_exits = len(holder.exit_codes)
    holder.send(signal.SIGSTOP)
    _wait_for(
        lambda: cluster.scheduler.log.read_text().count(_GONE) > num_moves,
        "the holder was not missed",
    )
    holder.send(signal.SIGCONT)
    _wait_for(lambda: len(holder.exit_codes) > num_exits, "no hand-over")
    if holder.exit_codes[num_exits] != _KILLED:
        raise AssertionError(f"{holder.name} ended with {holder.exit_codes[num_exits]}")


def _strike(cluster: Cluster, name: str) -> bool:
    """Have the pod of a point die there; return whether it did."""
    roles = {
        "trainer": cluster.trainers[0],
        "sampler": cluster.samplers[0],
        "scheduler": cluster.scheduler,
    }
    pod = roles[name.partition(".")[0]]
    # A restart that meets nothing to be computed again passes no `replayed`: another one may.
    num_rounds = _NUM_ROUNDS if name in _RESTORING else 1
    for _ in range(num_rounds):
        num_exits = len(pod.exit_codes)
        _arm(pod, name)
        _provoke(cluster, pod, name)
        # The first exit is that of the restart which armed it.
        with contextlib.suppress(TimeoutError):
            _wait_for(lambda: len(pod.exit_codes) >= num_exits + 2, name, _WAIT_S / num_rounds)  # noqa: B023
            return pod.exit_codes[num_exits + 1] == _KILLED
    return False


def _arm(pod: Pod, name: str) -> None:
    """Restart a pod so that it dies at a point."""
    pod.arm([f"{name}=kill:{_NUM_PASSINGS.get(name, 1)}"])
    pod.kill()
    _wait_for(
        lambda: pod.is_running and pod.armed.startswith(f"{name}="), f"{pod.name} does not start"
    )


def _provoke(cluster: Cluster, pod: Pod, name: str) -> None:
    """Do what makes a pod come to a point, where the tenant alone does not."""
    if name in _LEAVING:
        _wait_for(lambda: pod.is_listed, f"{pod.name} does not serve")
        pod.terminate()
    elif name in _MOVING:
        cluster.trainers[0].kill()
    elif name in _RELEASING:
        # A session that ends has its runs parked.
        with cluster.client() as client:
            client.create_lora_training_run(BASE_MODEL, rank=4)


def _wait_for(condition: Callable[[], bool], problem: str, timeout_s: float = _WAIT_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(problem)
        time.sleep(_POLL_S)
