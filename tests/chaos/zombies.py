"""A trainer is stopped for longer than its lease lasts, and wakes up as one too many.

Its run is taken over by another trainer, which finishes what was queued. When the stopped process
goes on it must find that out, change nothing, and end with the exit code of a fenced process.
"""

from __future__ import annotations

import signal
import time

from tests.chaos.cluster import Pod
from tests.chaos.ledger_view import LedgerView
from tests.chaos.report import Findings, Row
from tests.chaos.scenario import Deployed, Setting, deployment
from tests.chaos.tenants import IN_FLIGHT, Tenant, Tenants, Training, compare, supervised

_FENCED_EXIT_CODE = 3
_WAIT_S = 60.0
_POLL_S = 0.05


def run(setting: Setting) -> Findings:
    """Make zombies, one after another."""
    num_zombies = 10 if setting.is_long else 2
    num_fenced = 0
    changed: list[str] = []
    rows: list[Row] = []
    with deployment(setting, num_samplers=0) as deployed:
        view = LedgerView(deployed.postgres, deployed.database)
        tenants = Tenants(
            deployed.cluster, [Tenant(f"zombie-{n}", supervised, n) for n in range(num_zombies)]
        )
        disturbed: dict[str, Training] = {}
        for number in range(num_zombies):
            zombie, training = _stop_holder(deployed, view, tenants, number)
            disturbed.update(training)
            [run] = [each.run for each in training.values()]
            before = view.rows_of(run)
            num_exits = len(zombie.exit_codes)
            zombie.send(signal.SIGCONT)
            code = _wait_exit(zombie, num_exits)
            num_fenced += code == _FENCED_EXIT_CODE
            after = view.rows_of(run)
            changed += sorted(set(before) ^ set(after))
            setting.say(f"zombie {number + 1}: {zombie.name} ended with {code}")
        calm = tenants.repeat(disturbed)
        rows = [
            Row(name="zombies that ended as fenced", value=num_fenced, target=num_zombies),
            Row(name="rows of the ledger that a zombie changed", value=len(changed), target=0),
            *view.check([training.run for training in disturbed.values()]),
            *compare(calm, disturbed),
        ]
    return Findings(rows, {"changed rows": changed} if changed else {})


def _stop_holder(
    deployed: Deployed, view: LedgerView, tenants: Tenants, number: int
) -> tuple[Pod, dict[str, Training]]:
    """Stop the trainer of a tenant until another one has finished the training."""
    tenants.start(number)
    end_s = time.monotonic() + _WAIT_S
    while True:
        unfinished, holders = view.unfinished(), view.holders()
        if unfinished.num_queued >= IN_FLIGHT and view.num_finished() and len(holders) == 1:
            break
        if time.monotonic() > end_s:
            raise TimeoutError("the tenant does not train")
        time.sleep(_POLL_S)
    [zombie] = [pod for pod in deployed.cluster.trainers if pod.name == holders[0]]
    zombie.send(signal.SIGSTOP)
    end_s = time.monotonic() + _WAIT_S
    while view.holders() in ([], [zombie.name]):
        if time.monotonic() > end_s:
            raise TimeoutError("nobody takes the run over")
        time.sleep(_POLL_S)
    return zombie, tenants.join()


def _wait_exit(zombie: Pod, num_exits: int) -> int:
    """Return the exit code of the process that was resumed; it is started again meanwhile."""
    end_s = time.monotonic() + _WAIT_S
    while len(zombie.exit_codes) == num_exits:
        if time.monotonic() > end_s:
            raise TimeoutError(f"{zombie.name} did not end")
        time.sleep(_POLL_S)
    return zombie.exit_codes[num_exits]
