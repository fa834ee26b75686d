"""Jobs that train for real, applied with kubectl to a real API server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tinsmith
from tests.e2e.cluster import Json, Kubelet, TestCluster
from tests.e2e.deployment import GROUP_VERSION
from tests.e2e.training import (
    MODEL,
    POD_SETTINGS,
    TINY,
    TrainingDeployment,
)

_TRAINING_S = 240.0
_STEPS = 16

# The first process of a pod hears no signal that it does not handle.
_IDLE = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); time.sleep(3600)"
# Is ready as a trainer with a certificate is: by what it says beside its metrics.
_HEALTHY = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
signal.signal(15, lambda *_: sys.exit(0))
http.server.HTTPServer((os.environ["POD_IP"], 9090), Handler).serve_forever()
"""

pytestmark = pytest.mark.timeout(600)

NODES = "training"
"""Begins the names of the two nodes of `kubelet`."""


@pytest.fixture(scope="module")
def undisturbed(deployment: TrainingDeployment) -> dict[str, bytes]:
    """The weights of a job that ran through."""
    deployment.jobs.create("undisturbed", deployment.supervised(num_steps=_STEPS))
    deployment.jobs.wait_phase("undisturbed", "Succeeded", timeout_s=_TRAINING_S)
    return deployment.final_weights("undisturbed")


def test_a_job_trains_reports_and_leaves_a_checkpoint_that_loads(
    cluster: TestCluster, deployment: TrainingDeployment
) -> None:
    manifest = {
        "apiVersion": GROUP_VERSION,
        "kind": "TrainingJob",
        "metadata": {"name": "words"},
        "spec": deployment.supervised(num_steps=8, ttlSecondsAfterFinished=3600),
    }
    cluster.kubectl("apply", "-n", deployment.jobs.namespace, "-f", "-", stdin=yaml.dump(manifest))

    status = deployment.jobs.wait_phase("words", "Succeeded", timeout_s=_TRAINING_S)

    assert status["progress"]["summary"] == "8/8"
    assert status["progress"]["percent"] == 100
    with deployment.client() as client:
        checkpoint = client.checkpoints.get(status["checkpoint"]["final"]["name"])
        assert checkpoint.base_model == MODEL
    assert deployment.final_weights("words")
    cluster.wait_for(
        lambda: len(deployment.jobs.pods("words")) == 1, "all pods but the driver's to be gone"
    )
    with deployment.client() as client:
        run = checkpoint.name.partition("/checkpoints/")[0]
        assert checkpoint.name in {each.name for each in client.checkpoints.list(run)}
        assert checkpoint.name in {each.name for each in client.checkpoints.list()}
    listed = cluster.kubectl("get", "tj", "-n", deployment.jobs.namespace, "words")
    assert "Succeeded" in listed
    assert "8/8" in listed


def test_a_job_that_can_not_be_run_says_why_in_one_sentence(
    cluster: TestCluster, deployment: TrainingDeployment
) -> None:
    spec = deployment.supervised(num_steps=8)
    spec["method"]["parameters"]["learning_speed"] = 0.1
    deployment.jobs.create("broken", spec)

    status = deployment.jobs.wait_phase("broken", "Failed", timeout_s=_TRAINING_S)

    assert "learning_speed" in status["failure"]["message"]
    assert "\n" not in status["failure"]["message"]
    assert "startTime" not in status, "nothing was held for it"


def test_a_job_whose_trainer_node_is_lost_goes_on_elsewhere_with_the_same_bits(
    kubelet: Kubelet, deployment: TrainingDeployment, undisturbed: dict[str, bytes]
) -> None:
    jobs = deployment.jobs
    jobs.create("unlucky", deployment.supervised(num_steps=_STEPS))
    jobs.wait_step("unlucky", 3, _TRAINING_S)
    lost = next(e for e in jobs.status("unlucky")["assignments"] if e["role"] == "trainer")
    kubelet.lose_node(lost["node"])
    try:
        status = jobs.wait_phase("unlucky", "Succeeded", timeout_s=_TRAINING_S)
    finally:
        kubelet.return_node(lost["node"])

    assert status["restartCount"] == 0
    assert deployment.final_weights("unlucky") == undisturbed


def test_a_preempted_job_saves_gives_way_and_goes_on_with_the_same_bits(
    cluster: TestCluster, deployment: TrainingDeployment, undisturbed: dict[str, bytes]
) -> None:
    jobs = deployment.jobs
    cluster.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "urgent"},
            "value": 1000,
        }
    )
    # Keeps the other node busy, so that the two jobs cannot run beside each other.
    jobs.create("busy", _holding(deployment, 2))
    jobs.wait_phase("busy", "Running", timeout_s=_TRAINING_S)
    jobs.create("patient", deployment.supervised(num_steps=_STEPS))
    jobs.wait_step("patient", 3, _TRAINING_S)

    urgent = _holding(deployment, 2)
    jobs.create("hurried", {**urgent, "scheduling": {"priorityClassName": "urgent"}})
    cluster.wait_for(
        lambda: (
            jobs.status("patient")["phase"] in ("Preempting", "Queued", "Running")
            and jobs.status("hurried").get("phase") == "Running"
        ),
        "the urgent job to run",
        timeout_s=_TRAINING_S,
    )
    first = {e["pod"] for e in jobs.status("patient").get("assignments", [])}
    jobs.patch("hurried", {"cancel": True})
    status = jobs.wait_phase("patient", "Succeeded", timeout_s=_TRAINING_S)
    jobs.patch("busy", {"cancel": True})
    jobs.wait_phase("busy", "Cancelled")

    assert {e["type"] for e in status["conditions"] if e["status"] == "True"} >= {"Complete"}
    assert not first & {e["pod"] for e in status.get("assignments", [])}
    assert status["restartCount"] == 0
    assert deployment.final_weights("patient") == undisturbed


def test_a_job_that_is_edited_while_suspended_goes_on_from_what_it_has(
    deployment: TrainingDeployment,
) -> None:
    jobs = deployment.jobs
    jobs.create("edited", deployment.supervised(num_steps=_STEPS))
    jobs.wait_step("edited", 2, _TRAINING_S)
    jobs.patch("edited", {"suspend": True})
    saved = jobs.wait_phase("edited", "Suspended", timeout_s=_TRAINING_S)["checkpoint"]["latest"]
    num_steps = saved["step"] + 2
    method = {"maxSteps": num_steps, "parameters": {"learning_rate": 1e-3}}
    jobs.patch("edited", {"suspend": False, "method": method})
    final = jobs.wait_phase("edited", "Succeeded", timeout_s=_TRAINING_S)["checkpoint"]["final"]

    run = saved["name"].partition("/checkpoints/")[0]
    assert final["name"] == f"{run}/checkpoints/final"
    with deployment.client() as client:
        assert client.checkpoints.get(final["name"]).version == num_steps


def test_a_laptop_trains_on_a_pool_through_the_gateway(
    cluster: TestCluster, deployment: TrainingDeployment
) -> None:
    jobs = deployment.jobs
    model = {"name": "pooled", "source": f"pvc://models/{MODEL}"}
    spec: Json = {"model": model, "trainer": deployment.role(), "sampler": deployment.role()}
    jobs.create("shared", spec, kind="TrainerPool")
    jobs.wait_phase("shared", "Ready", timeout_s=_TRAINING_S, plural="trainerpools")

    with deployment.client() as client:
        run = client.create_lora_training_run(base_model="pooled", rank=8)
        tokens = run.get_tokenizer().encode("the quick brown fox")
        datum = tinsmith.Datum(
            model_input=tinsmith.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        losses = []
        for _ in range(3):
            gradient = run.forward_backward([datum], "cross_entropy")
            run.optim_step(tinsmith.AdamParams(learning_rate=1e-2)).result()
            losses.append(gradient.result().loss)
        sampled = run.sampler().sample(
            tinsmith.ModelInput.from_ints(tokens[:2]),
            sampling_params=tinsmith.SamplingParams(max_tokens=4, temperature=0.0),
            num_samples=1,
        )

        # An upgrade drains the trainer under the run, and the run goes on.
        before = {pod["metadata"]["name"] for pod in jobs.pods("shared")}
        env = [*POD_SETTINGS, {"name": "TINSMITH_DRAIN_TIMEOUT_S", "value": "20"}]
        changed = {**deployment.role(), "template": {"env": env}}
        jobs.patch("shared", {"trainer": changed, "sampler": changed}, plural="trainerpools")
        cluster.wait_for(
            lambda: not before & {pod["metadata"]["name"] for pod in jobs.pods("shared")},
            "all pods to be new",
            timeout_s=_TRAINING_S,
        )
        gradient = run.forward_backward([datum], "cross_entropy")
        run.optim_step(tinsmith.AdamParams(learning_rate=1e-2)).result()
        losses.append(gradient.result().loss)

        assert losses[-1] < losses[-2] < losses[0]
        assert len(sampled.result().sequences[0].tokens) == 4

    jobs.create(
        "guest",
        {
            "method": {"type": "supervised", "maxSteps": 2, "parameters": {"batch_size": 2}},
            "poolRef": {"name": "shared"},
            "roles": {"driver": {"resources": TINY}},
        },
    )
    jobs.wait_phase("guest", "Succeeded", timeout_s=_TRAINING_S)
    cluster.api.delete(jobs.url("shared", plural="trainerpools"))
    cluster.wait_for(lambda: not jobs.pods("shared"), "the pods of the pool to be gone")


def test_the_ranks_of_a_full_parameter_trainer_meet_and_train(
    deployment: TrainingDeployment,
) -> None:
    spec = deployment.supervised(num_steps=2, adapter={"type": "full"})
    spec["method"]["parameters"]["learning_rate"] = 1e-3
    spec["roles"]["trainer"] = deployment.role(replicas=2)
    deployment.jobs.create("ranks", spec)

    status = deployment.jobs.wait_phase("ranks", "Succeeded", timeout_s=_TRAINING_S)

    assert status["progress"]["summary"] == "2/2"
    assert "model" in next(iter(deployment.final_weights("ranks")))


def test_a_laptop_submits_a_job_to_the_cluster_and_follows_it(
    cluster: TestCluster, deployment: TrainingDeployment, tmp_path: Path
) -> None:
    manifest = {
        "apiVersion": GROUP_VERSION,
        "kind": "TrainingJob",
        "metadata": {"name": "from-afar"},
        "spec": deployment.supervised(num_steps=4),
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.dump(manifest))

    def tinsmith_command(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", "from tinsmith.cli import main; main()", "jobs", *arguments],
            env={
                **os.environ,
                "TINSMITH_ADDRESS": deployment.address,
                "TINSMITH_API_KEY": deployment.api_key,
            },
            capture_output=True,
            text=True,
            timeout=_TRAINING_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    tinsmith_command("submit", str(path))
    assert deployment.jobs.get("from-afar")["spec"]["method"]["maxSteps"] == 4
    with deployment.client() as client:
        phases = [job.phase for job in client.jobs.watch("from-afar")]
        # Its places are given back by then; its pods stay for their logs.
        cluster.wait_for(lambda: "assignments" not in deployment.jobs.status("from-afar"))
        printed = "".join(client.jobs.logs("from-afar"))

    assert phases[-1] == "Succeeded"
    assert "Running" in phases
    assert "step 4/4" in printed
    assert "4/4" in tinsmith_command("describe", "from-afar")
    tinsmith_command("delete", "from-afar")
    cluster.wait_for(
        lambda: all(job["metadata"]["name"] != "from-afar" for job in deployment.jobs.all())
    )


def test_a_checkpoint_is_served_to_openai_clients_until_the_job_is_cancelled(
    cluster: TestCluster, deployment: TrainingDeployment, undisturbed: dict[str, bytes]
) -> None:
    import openai

    jobs = deployment.jobs
    checkpoint = jobs.status("undisturbed")["checkpoint"]["final"]["name"]
    jobs.create(
        "serving",
        {
            "method": {"type": "serve"},
            "serve": {"checkpoint": checkpoint},
            "model": {"name": MODEL, "source": f"pvc://models/{MODEL}"},
            "roles": {"sampler": deployment.role()},
        },
    )
    status = jobs.wait_phase("serving", "Running", timeout_s=_TRAINING_S)
    assert status["endpoint"] == deployment.address

    client = openai.OpenAI(
        base_url=f"http://{deployment.address}/v1", api_key=deployment.api_key, max_retries=5
    )
    answer = client.completions.create(model=checkpoint, prompt="the quick", max_tokens=4)
    client.close()

    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    jobs.patch("serving", {"cancel": True})
    jobs.wait_phase("serving", "Cancelled")


def _holding(deployment: TrainingDeployment, gpus: int) -> Json:
    """Return the spec of a job that holds GPUs of one node and does nothing."""
    return {
        "method": {"type": "custom"},
        "model": {"name": MODEL, "source": f"pvc://models/{MODEL}"},
        "roles": {
            "trainer": {
                **deployment.role(gpus=gpus),
                "template": {"command": [sys.executable, "-c", _HEALTHY]},
            },
            "driver": {
                "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
                "template": {"command": [sys.executable, "-c", _IDLE]},
            },
        },
        "scheduling": {"preemptionPolicy": "Never"},
    }
