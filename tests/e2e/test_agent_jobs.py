"""A job of two agents: a trainer and a sampler each, one coordinator, and a kill on the way."""

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

_TRAINING_S = 480.0
_STEPS = 10
_SMALL: Json = {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
_PROCESSOR: Json = {"gpus": 0, "resources": TINY, "template": {"env": POD_SETTINGS}}
_OTHER = "other"

pytestmark = pytest.mark.timeout(900)

NODES = "agents"
"""Begins the names of the two nodes of `kubelet`."""


def _match() -> Json:
    own = {"trainer": _PROCESSOR, "sampler": _PROCESSOR}
    return {
        "method": {
            "type": "match",
            "maxSteps": _STEPS,
            "parameters": {
                "data": "kuhn",
                "num_imitation_steps": 4,
                "num_games": 4,
                "max_tokens": 4,
                "num_validation": 2,
                "num_warmup_steps": 1,
                "environment": "guessing",
            },
        },
        "model": {"name": MODEL, "source": f"pvc://models/{MODEL}"},
        "adapter": {"rank": 4},
        "roles": {
            "agents": [
                {"name": "black", **own},
                {
                    "name": "white",
                    "model": {"name": _OTHER, "source": f"pvc://models/{MODEL}"},
                    "adapter": {"rank": 8},
                    **own,
                },
            ],
            "coordinator": _SMALL,
            "environment": {"replicas": 2, **_SMALL},
            "driver": _SMALL,
        },
        "checkpoint": {"everySteps": 4},
    }


def _weights_of(deployment: TrainingDeployment, base_model: str) -> list[dict[str, bytes]]:
    """Return the weights of all final checkpoints of a base model."""
    with deployment.client() as client:
        names = [each.name for each in client.checkpoints.list() if each.base_model == base_model]
    return [deployment.weights(name) for name in names if name.endswith("/checkpoints/final")]


def test_a_match_whose_trainer_is_killed_ends_with_the_bits_of_one_that_ran_through(
    kubelet: Kubelet, deployment: TrainingDeployment
) -> None:
    jobs = deployment.jobs
    for name in ("calm", "disturbed"):
        jobs.create(name, _match())
    jobs.wait_step("disturbed", 6, _TRAINING_S)
    victim = next(
        entry["pod"]
        for entry in jobs.status("disturbed")["assignments"]
        if entry["role"] == "agent/black/trainer"
    )
    os.kill(kubelet.pid(jobs.namespace, victim), signal.SIGKILL)

    statuses = {
        name: jobs.wait_phase(name, "Succeeded", timeout_s=_TRAINING_S)
        for name in ("calm", "disturbed")
    }

    assert statuses["disturbed"]["restartCount"] == 1
    roles = {entry["name"]: entry["desired"] for entry in statuses["calm"]["roleStatuses"]}
    assert roles == {
        "agent/black/trainer": 1,
        "agent/black/sampler": 1,
        "agent/white/trainer": 1,
        "agent/white/sampler": 1,
        "coordinator": 1,
        "environment": 2,
        "driver": 1,
    }
    assert statuses["calm"]["progress"]["summary"] == f"{_STEPS}/{_STEPS}"
    reported = {
        name: {entry["name"]: entry["value"] for entry in status["progress"]["metrics"]}
        for name, status in statuses.items()
    }
    assert float(reported["calm"]["black/mismatch"]) == 0.0
    assert float(reported["calm"]["white/mismatch"]) == 0.0
    assert json.dumps(reported["calm"], sort_keys=True) == json.dumps(
        reported["disturbed"], sort_keys=True
    )
    for base_model in (MODEL, _OTHER):
        first, second = _weights_of(deployment, base_model)
        assert first == second, f"the policy of {base_model}"
