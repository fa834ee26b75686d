"""Every method of jobs to its end on a cluster, with data, a hub, stores and resumption."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cluster import Json, TestCluster, path
from tests.e2e.players import LOOP, PLAYER
from tests.e2e.training import (
    MODEL,
    TINY,
    TrainingDeployment,
    claimed_folder,
    create_secret,
    process_nodes,
    training_deployment,
    two_nodes,
)
from tests.fakes.hub import HubMirror, running_hub, write_dataset
from tests.fakes.s3_server import CREDENTIALS
from tests.support.scenario_samples import SAMPLES, STEPS, shortened
from tinsmith.names import shorten
from tinsmith_local.tiny_model import build_tiny_model
from tinsmith_runtime import storage

_TRAINING_S = 420.0
_SCRIPT = Path(__file__).parents[2] / "k8s" / "samples" / "script-in-a-config-map.yaml"
_POOLED = "pooled"
_OWN_BUCKET = "own-bucket"
_HUB_MODEL = "org/tiny"
_HUB_DATA = "org/sums"
_DRIVER: Json = {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
_PROCESSOR: Json = {"gpus": 0, "resources": TINY}
_SMALL_RL: Json = {
    "num_problems": 2,
    "group_size": 2,
    "max_tokens": 2,
    "num_validation": 2,
    "num_warmup_steps": 1,
}
_EXAMPLES = [
    {
        "messages": [
            {"role": "user", "content": f"say {word}"},
            {"role": "assistant", "content": word},
        ]
    }
    for word in ("one", "two", "three", "four", "five", "six")
]
_PROBLEMS = [{"question": f"{n} + 1 = ?", "answer": f"#### {n + 1}"} for n in range(12)]

pytestmark = pytest.mark.timeout(600)


@dataclass
class Started:
    """A deployment with jobs that were created together: they train beside each other."""

    deployment: TrainingDeployment
    hub: HubMirror

    def status(self, job: str) -> Json:
        """Return the status of a job that has succeeded."""
        return self.deployment.jobs.wait_phase(job, "Succeeded", timeout_s=_TRAINING_S)


@pytest.fixture(scope="module")
def started(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """All jobs of this module but those that go on from others."""
    folder = tmp_path_factory.mktemp("methods")
    with (
        process_nodes(cluster, two_nodes("methods")),
        cluster.namespace() as namespace,
        training_deployment(cluster, namespace, folder) as deployment,
    ):
        models = build_tiny_model(folder / MODEL)
        sums = {_HUB_DATA: write_dataset(folder / "sums")}
        with running_hub({_HUB_MODEL: models}, sums) as hub:
            _provide_data(cluster, namespace)
            deployment.store.create_bucket(_OWN_BUCKET)
            own = storage.open(deployment.store.uri(_OWN_BUCKET), environment=CREDENTIALS)
            own.write("data/train.jsonl", _lines(_EXAMPLES).encode())
            create_secret(cluster, namespace, "own-bucket", CREDENTIALS)
            create_secret(cluster, namespace, "hub-token", {"token": "hf_of_a_test"})
            shared = {"model": _model(_POOLED), "trainer": _PROCESSOR, "sampler": _PROCESSOR}
            deployment.jobs.create("shared", shared, kind="TrainerPool")
            for name, spec in _jobs(deployment, hub).items():
                deployment.jobs.create(name, spec)
            yield Started(deployment, hub)


def _provide_data(cluster: TestCluster, namespace: str) -> None:
    content = {"metadata": {"name": "examples"}, "data": {"train.jsonl": _lines(_EXAMPLES)}}
    cluster.api.create(path("v1", "configmaps", namespace), content)
    config_map, job = _sample()
    name = job["spec"]["model"]["name"]
    scripts = {key: text.replace(name, _POOLED) for key, text in config_map["data"].items()}
    cluster.api.create(path("v1", "configmaps", namespace), {**config_map, "data": scripts})
    problems = claimed_folder(cluster, namespace, "datasets") / "problems.jsonl"
    problems.parent.mkdir(parents=True, exist_ok=True)
    problems.write_text(_lines(_PROBLEMS))


def _lines(rows: list[Json]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _sample() -> tuple[Json, Json]:
    """Return the ConfigMap and the job of the sample that has its loop in a ConfigMap."""
    config_map, job = yaml.safe_load_all(_SCRIPT.read_text())
    return config_map, job


def _script_template() -> Json:
    template: Json = _sample()[1]["spec"]["roles"]["driver"]["template"]
    _, script = template["command"]
    return {**template, "command": [sys.executable, script]}


def _model(name: str = MODEL) -> Json:
    return {"name": name, "source": f"pvc://models/{MODEL}"}


def _job(method: str, *, steps: int = 2, **further: Any) -> Json:
    """Return a job of a pool; `parameters` and what the spec has besides are further."""
    parameters = further.pop("parameters", {})
    return {
        "poolRef": {"name": "shared"},
        "adapter": {"rank": 4},
        "method": {"type": method, "maxSteps": steps, "parameters": parameters},
        "roles": {"driver": _DRIVER},
        **further,
    }


def _own(method: str, roles: Json, **further: Any) -> Json:
    """Return a job with trainers and samplers of its own."""
    spec = _job(method, **further)
    del spec["poolRef"]
    return {"model": _model(), **spec, "roles": {"driver": _DRIVER, **roles}}


def _jobs(deployment: TrainingDeployment, hub: HubMirror) -> dict[str, Json]:
    loop = [sys.executable, "-c", LOOP.format(model=_POOLED)]
    player = {"template": {"command": [sys.executable, "-c", PLAYER]}, **_DRIVER}
    mirrored = {"env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}]}
    return {
        "grpo": _job("rl", parameters=_SMALL_RL),
        "ppo": _job(
            "rl",
            parameters={**_SMALL_RL, "loss": "ppo"},
            data={"pvc": "datasets/problems.jsonl"},
        ),
        "hub-data": _job(
            "rl",
            parameters=_SMALL_RL,
            data={"name": f"hf://{_HUB_DATA}:main?question=problem"},
            roles={"driver": {**_DRIVER, "template": mirrored}},
        ),
        "self-play": _job(
            "self_play",
            parameters={
                "data": "kuhn",
                "num_imitation_steps": 1,
                "num_games": 4,
                "num_validation": 2,
                "max_tokens": 4,
            },
        ),
        "examples": _job(
            "supervised",
            steps=4,
            parameters={"batch_size": 2},
            data={"configMapRef": {"name": "examples", "key": "train.jsonl"}},
        ),
        "own-loop": _job("custom", roles={"driver": {**_DRIVER, "template": {"command": loop}}}),
        "script": _job("custom", roles={"driver": {**_DRIVER, "template": _script_template()}}),
        "environment": _own(
            "rl",
            {
                "trainer": _PROCESSOR,
                "sampler": _PROCESSOR,
                "environment": {"replicas": 2, "resources": _DRIVER["resources"]},
            },
            parameters={**_SMALL_RL, "environment": "guessing"},
        ),
        "episodes": _own(
            "rl_episodes",
            {
                "trainer": _PROCESSOR,
                "sampler": _PROCESSOR,
                "coordinator": {"resources": _DRIVER["resources"]},
                "agents": [{"name": "player", "worker": {"replicas": 2, **player}}],
            },
            parameters={"num_tasks": 2, "group_size": 2, "num_validation": 2},
        ),
        "hub": _own(
            "supervised",
            {"trainer": {**_PROCESSOR, "template": mirrored}},
            model={
                "name": "from-hub",
                "source": f"hf://{_HUB_MODEL}",
                "hubTokenSecretRef": {"name": "hub-token"},
            },
            parameters={"batch_size": 2},
            data={"name": f"s3://{_OWN_BUCKET}/data/train.jsonl"},
            checkpoint=_own_store(deployment),
        ),
    }


def _own_store(deployment: TrainingDeployment) -> Json:
    uri = deployment.store.uri(_OWN_BUCKET, "of-a-job")
    return {"uri": uri, "secretRef": {"name": "own-bucket"}}


@pytest.mark.parametrize("job", ["grpo", "ppo", "hub-data", "self-play", "environment", "episodes"])
def test_a_method_that_samples_trains_to_its_end(started: Started, job: str) -> None:
    status = started.status(job)

    assert status["progress"]["summary"] == "2/2"
    metrics = {entry["name"] for entry in status["progress"]["metrics"]}
    assert "reward" in metrics
    with started.deployment.client() as client:
        name = status["checkpoint"]["final"]["name"]
        assert client.checkpoints.get(name).name == name


def test_pods_of_environments_and_coordinators_are_those_of_the_job(started: Started) -> None:
    roles = {
        job: {entry["name"]: entry["desired"] for entry in started.status(job)["roleStatuses"]}
        for job in ("environment", "episodes")
    }
    assert roles["environment"] == {"trainer": 1, "sampler": 1, "environment": 2, "driver": 1}
    assert roles["episodes"] == {
        "trainer": 1,
        "sampler": 1,
        "coordinator": 1,
        "driver": 1,
        "agent/player/worker": 2,
    }


def test_a_loop_of_ones_own_reports_and_leaves_its_checkpoint(started: Started) -> None:
    status = started.status("own-loop")

    assert status["progress"]["summary"] == "3/3"
    assert status["checkpoint"]["final"]["name"].endswith("/checkpoints/mine")


def test_the_script_of_the_sample_trains_from_its_config_map(started: Started) -> None:
    status = started.status("script")

    assert status["progress"]["summary"] == "20/20"
    assert status["checkpoint"]["final"]["name"].endswith("/checkpoints/final")


def test_a_model_of_the_hub_is_trained_on_data_of_a_bucket_of_ones_own_and_into_it(
    started: Started,
) -> None:
    status = started.status("hub")

    assert f"{_HUB_MODEL}/model.safetensors" in started.hub.served
    run = status["progress"]["run"]
    kept = started.deployment.store.keys(_OWN_BUCKET)
    assert [key for key in kept if key.startswith(f"of-a-job/{run}/checkpoints/training/final-")]


def test_data_that_is_not_in_its_bucket_fails_a_job_that_says_so(started: Started) -> None:
    spec = _job(
        "supervised",
        data={"name": f"s3://{_OWN_BUCKET}/no/such.jsonl"},
        checkpoint=_own_store(started.deployment),
    )
    started.deployment.jobs.create("no-data", spec)

    status = started.deployment.jobs.wait_phase("no-data", "Failed", timeout_s=_TRAINING_S)

    store = started.deployment.store
    assert status["failure"]["message"] == (
        "driver 0 ended with exit code 2: spec.data.name cannot be fetched with the keys of "
        f"spec.checkpoint: no/such.jsonl does not exist in s3://{_OWN_BUCKET} at {store.endpoint}; "
        "put it there, or correct spec.data.name"
    )


def test_a_checkpoint_is_scored_beside_its_base_model_by_samplers_alone(started: Started) -> None:
    saved = started.status("examples")["checkpoint"]["final"]["name"]
    scored = {"num_validation": 2, "base_model": _POOLED, "checkpoint": saved}
    alone = {"num_validation": 2, "environment": "guessing"}
    spec = {"model": _model(_POOLED), "roles": {"driver": _DRIVER, "sampler": _PROCESSOR}}
    environment = {"environment": {"resources": _DRIVER["resources"]}}
    jobs = {
        "scored": {**spec, "method": {"type": "evaluate", "parameters": scored}},
        "scored-alone": {
            **spec,
            "roles": {**spec["roles"], **environment},
            "method": {"type": "evaluate", "parameters": alone},
        },
    }
    for name, job in jobs.items():
        started.deployment.jobs.create(name, job)

    statuses = {name: started.status(name) for name in jobs}

    roles = {entry["name"] for entry in statuses["scored"]["roleStatuses"]}
    assert roles == {"sampler", "driver"}
    progress = {name: status["progress"] for name, status in statuses.items()}
    assert {name: found["summary"] for name, found in progress.items()} == {
        "scored": "2/2",
        "scored-alone": "1/1",
    }
    told = {entry["name"] for entry in progress["scored"]["metrics"]}
    assert told >= {"reward", "gain", f"reward/{_POOLED}", f"reward/{shorten(saved)}"}
    assert "reward" in progress["scored-alone"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.stem)
def test_a_scenario_of_the_samples_trains_to_its_end(started: Started, sample: Path) -> None:
    manifest = shortened(sample)
    for role in ("trainer", "sampler"):
        manifest["spec"]["roles"][role] = _PROCESSOR
    manifest["spec"]["roles"]["driver"] = _DRIVER
    name = manifest["metadata"]["name"]
    started.deployment.jobs.create(name, manifest["spec"])

    status = started.status(name)

    assert status["progress"]["summary"] == f"{STEPS}/{STEPS}"
    with started.deployment.client() as client:
        final = status["checkpoint"]["final"]["name"]
        assert client.checkpoints.get(final).base_model == manifest["spec"]["model"]["name"]


def test_a_job_begins_with_the_checkpoint_of_another(started: Started) -> None:
    first = started.status("examples")["checkpoint"]["final"]["name"]
    jobs = started.deployment.jobs
    further = _job(
        "supervised",
        steps=2,
        parameters={"batch_size": 2},
        data={"configMapRef": {"name": "examples", "key": "train.jsonl"}},
        checkpoint={"resumeFrom": first, "finalName": "second-round"},
    )
    jobs.create("resumed", further)

    final = started.status("resumed")["checkpoint"]["final"]["name"]

    assert final.endswith("/checkpoints/second-round")
    with started.deployment.client() as client:
        # Steps of the optimizer go on; the new run counts its own.
        assert client.checkpoints.get(final).base_model == _POOLED
    assert started.deployment.weights(final) != started.deployment.weights(first)
