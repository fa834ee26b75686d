"""A restart of the controller among many jobs that wait: it decides as the process before it."""

from __future__ import annotations

import pytest

from tests.e2e.lab import Lab, training

_NUM_WAITING = 100
_NUM_RESTARTS = 3
_PATIENCE_S = 60.0

pytestmark = pytest.mark.timeout(300)


def test_no_restart_gives_gpus_to_a_job_that_waits_for_something_else(lab: Lab) -> None:
    """Its copies of all objects are new, and the first decision may come before any look."""
    with lab.nodes(1) as _:
        blocked = training(gpus=8, scheduling={"priorityClassName": "no-such-class"})
        lab.jobs.create("zz-blocked", blocked)
        lab.jobs.wait_phase("zz-blocked", "Queued")
        for number in range(_NUM_WAITING):
            lab.jobs.create(f"j{number:03}", training(gpus=16))
        for restart in range(_NUM_RESTARTS):
            lab.controller.stop()
            lab.controller.start()
            # That it gets the node shows that nodes were decided about, and that it was free.
            lab.jobs.create(f"fine-{restart}", training(gpus=8))
            lab.jobs.wait_phase(f"fine-{restart}", "Running", timeout_s=_PATIENCE_S)
            assert not lab.jobs.status("zz-blocked").get("assignedGPUs")
            lab.jobs.patch(f"fine-{restart}", {"cancel": True})
            lab.jobs.wait_phase(f"fine-{restart}", "Cancelled", timeout_s=_PATIENCE_S)
        assert "PriorityClass no-such-class" in lab.jobs.status("zz-blocked")["waitingFor"]
