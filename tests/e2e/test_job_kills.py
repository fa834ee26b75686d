"""Every kind of pod of a job killed in turn, and the controller: the bits of a calm job."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.e2e.cluster import Json, Kubelet
from tests.e2e.training import (
    MODEL,
    POD_SETTINGS,
    TINY,
    TrainingDeployment,
)

_TRAINING_S = 600.0
_STEPS = 22
_SMALL: Json = {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
_PROCESSOR: Json = {"gpus": 0, "resources": TINY, "template": {"env": POD_SETTINGS}}
_KILLS = {
    3: "environment",
    6: "sampler",
    9: "coordinator",
    12: "driver",
    15: "controller",
    18: "trainer",
}
"""By the step that the job has reported: between two checkpoints, or just behind one."""

pytestmark = pytest.mark.timeout(1200)

NODES = "kills"
"""Begins the names of the two nodes of `kubelet`."""


def _rl() -> Json:
    return {
        "method": {
            "type": "rl",
            "maxSteps": _STEPS,
            "parameters": {
                "environment": "guessing",
                "rollouts": "server",
                "num_problems": 2,
                "group_size": 2,
                "max_tokens": 2,
                "num_validation": 2,
                "num_warmup_steps": 1,
            },
        },
        "model": {"name": MODEL, "source": f"pvc://models/{MODEL}"},
        "adapter": {"rank": 4},
        "roles": {
            "trainer": _PROCESSOR,
            "sampler": _PROCESSOR,
            "environment": _SMALL,
            "coordinator": _SMALL,
            "driver": _SMALL,
        },
        "checkpoint": {"everySteps": 4},
        "backoffLimit": len(_KILLS),
    }


def test_a_job_whose_pods_are_killed_in_turn_ends_with_the_bits_of_a_calm_one(
    kubelet: Kubelet, deployment: TrainingDeployment
) -> None:
    jobs = deployment.jobs
    for name in ("calm", "disturbed"):
        jobs.create(name, _rl())
    for step, role in _KILLS.items():
        jobs.wait_step("disturbed", step, _TRAINING_S)
        if role == "controller":
            assert deployment.controller is not None
            deployment.controller.kill()
            deployment.controller.start()
            continue
        pods = [each for each in jobs.status("disturbed")["assignments"] if each["role"] == role]
        os.kill(kubelet.pid(jobs.namespace, pods[0]["pod"]), signal.SIGKILL)

    statuses = {
        name: jobs.wait_phase(name, "Succeeded", timeout_s=_TRAINING_S)
        for name in ("calm", "disturbed")
    }

    # The controller is no pod of a job: its end restarts none.
    assert statuses["calm"].get("restartCount", 0) == 0
    assert 0 < statuses["disturbed"]["restartCount"] <= len(_KILLS) - 1
    reported = {
        name: {entry["name"]: entry["value"] for entry in status["progress"]["metrics"]}
        for name, status in statuses.items()
    }
    assert statuses["disturbed"]["progress"]["summary"] == f"{_STEPS}/{_STEPS}"
    assert json.dumps(reported["calm"], sort_keys=True) == json.dumps(
        reported["disturbed"], sort_keys=True
    )
    assert deployment.final_weights("calm") == deployment.final_weights("disturbed")
