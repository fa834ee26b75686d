"""What is told before GPUs are held, or gives them back: models too large, images out of reach."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.controller.cluster_in_memory import NAMESPACE, World
from tests.unit.controller.manifests_as_written import CUSTOM, deployment, manifest, told
from tests.unit.controller.process_in_memory import Process, status_of

from tinsmith_jobs.model_memory import least_gpu_bytes
from tinsmith_jobs.plan.image_pulls import unpulled, with_image_pulls
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import Observed, PodView
from tinsmith_jobs.spec_codec import decode_job
from tinsmith_jobs.status import Assignment, Failure, Progress, Status

GIB = 2**30
LARGE = 'model: {name: qwen3-32b, source: "hf://Qwen/Qwen3-32B"}'
IMAGE = "registry.example.com/team/loop:1"


def with_gpu_memory(world: World, name: str, mib: int, num_gpus: int = 8) -> None:
    """Let a node say its GPUs' memory, as NVIDIA's feature discovery does."""
    if not world.has("nodes", "", name):
        world.node(name, num_gpus)
    body = world.get("nodes", "", name)
    labels = body["metadata"].get("labels", {}) | {"nvidia.com/gpu.memory": str(mib)}
    body["metadata"]["labels"] = labels
    world.store("nodes", "", body)


def condition_of(world: World, kind: str) -> dict[str, Any]:
    return next((c for c in status_of(world, "a")["conditions"] if c["type"] == kind), {})


def test_a_model_that_no_gpu_holds_waits_without_any(tmp_path: Path) -> None:
    world, process = deployment(tmp_path)
    with_gpu_memory(world, "n0", 24564)
    world.create("trainingjobs", NAMESPACE, manifest(LARGE))

    process.settle()

    sentence = (
        "for the trainer: no node has GPUs that hold the model: it takes 65.0 GiB of each, and the "
        "largest have 24 GiB; give each pod more GPUs, or take a smaller model"
    )
    assert told(world, "a") == ("Queued", sentence)
    assert condition_of(world, "Assigned")["reason"] == "NoNodeFits"
    assert not world.assigned()


@pytest.mark.parametrize(
    ("mib", "trainer"),
    [
        pytest.param(24564, "{gpus: 4}", id="in-parts"),
        pytest.param(81559, "{gpus: 1}", id="large-gpus"),
    ],
)
def test_a_model_that_fits_starts(tmp_path: Path, mib: int, trainer: str) -> None:
    world, process = deployment(tmp_path)
    with_gpu_memory(world, "n0", mib)
    world.create("trainingjobs", NAMESPACE, manifest(f"{LARGE}\nroles: {{trainer: {trainer}}}"))

    process.settle()

    assert told(world, "a") == ("Running", "")


def test_a_large_model_goes_to_the_nodes_that_hold_it_or_may(tmp_path: Path) -> None:
    world, process = deployment(tmp_path)
    with_gpu_memory(world, "n0", 24564)
    world.node("n2", 1)  # says nothing of its memory
    world.create("trainingjobs", NAMESPACE, manifest(LARGE))

    process.settle()

    assert world.assigned() == {"n2": 1}


@pytest.mark.parametrize(
    ("roles", "adapter", "dtype", "role", "expected_gib"),
    [
        # 8.19e9 weights of 2 bytes; a LoRA of rank 32 has 87.3e6, in four float32 rows.
        pytest.param({"trainer": {}}, {}, "auto", "trainer", 15.26 + 1.30, id="lora"),
        pytest.param({"trainer": {"gpus": 2}}, {}, "auto", "trainer", 8.28, id="lora-in-parts"),
        pytest.param({"trainer": {}}, {}, "float32", "trainer", 30.51 + 1.30, id="float32"),
        pytest.param(
            {"trainer": {"gpus": 8, "replicas": 2}},
            {"type": "full"},
            "auto",
            "trainer",
            (15.26 + 8 * 15.26) / 16,
            id="all-weights-on-16-ranks",
        ),
        pytest.param({"trainer": {}, "sampler": {}}, {}, "auto", "sampler", 15.26, id="sampler"),
        pytest.param({"trainer": {"gpus": 0}}, {}, "auto", "trainer", 0, id="no-gpu"),
        pytest.param({"trainer": {}}, {}, "auto", "driver", 0, id="driver"),
    ],
)
def test_the_least_memory_is_that_of_the_plan(
    roles: dict[str, Any], adapter: dict[str, Any], dtype: str, role: str, expected_gib: float
) -> None:
    model = {"name": "m", "source": "hf://Qwen/Qwen3-8B", "dtype": dtype}
    method = {"type": "supervised"}
    spec = {"model": model, "method": method, "adapter": adapter, "roles": roles}
    job = decode_job("a", spec)
    found = job.role(role)
    assert found is not None
    assert least_gpu_bytes(job, found) / GIB == pytest.approx(expected_gib, rel=0.01)


@pytest.mark.parametrize("source", ["hf://team/own", "pvc://models/qwen3-8b"])
def test_what_is_not_known_is_not_refused(source: str) -> None:
    model = {"name": "m", "source": source}
    spec = {"model": model, "method": {"type": "supervised"}, "roles": {"trainer": {}}}
    job = decode_job("a", spec)
    trainer = job.role("trainer")
    assert trainer is not None
    assert least_gpu_bytes(job, trainer) == 0


def without_an_image(world: World, process: Process, name: str, kind: str, reason: str) -> None:
    """Let the kubelet of a pod say that it cannot pull its image."""
    pod = world.get("pods", NAMESPACE, name)
    waiting = {"reason": reason, "message": "manifest unknown"}
    entry = {"name": kind, "state": {"waiting": waiting}}
    pod["status"] = {"phase": "Pending", "containerStatuses": [entry]}
    world.store("pods", NAMESPACE, pod)
    process.settle(4)


def test_an_image_that_cannot_be_pulled_is_told_and_gives_the_gpus_back(tmp_path: Path) -> None:
    world, process = deployment(tmp_path)
    world.create("trainingjobs", NAMESPACE, manifest(CUSTOM))
    world.silent_pods.add("a-driver-0-e1")
    process.settle(4)

    without_an_image(world, process, "a-driver-0-e1", "driver", "ErrImagePull")

    found = condition_of(world, "ImageUnavailable")
    assert (found["status"], found["reason"]) == ("True", "ImagePullFailed")
    assert found["message"] == (
        f"driver 0 cannot pull the image {IMAGE}: correct its name in the template of the driver, "
        "or name the Secret of its registry in imagePullSecrets there"
    )
    assert world.assigned() == {"n0": 1}
    assert [told[1] for told in process.events.told].count("ImagePullFailed") == 1

    world.now_s += 590
    without_an_image(world, process, "a-driver-0-e1", "driver", "ImagePullBackOff")
    assert told(world, "a")[0] == "Starting"
    process.settle(20)

    phase, sentence = told(world, "a")
    assert phase == "Failed"
    assert sentence.startswith(f"for 600 s, driver 0 cannot pull the image {IMAGE}: correct")
    assert sentence.endswith("(ImagePullBackOff: manifest unknown)")
    assert status_of(world, "a")["failure"]["reason"] == "ImagePullFailed"
    assert not world.assigned()


NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
ROLES = {"trainer": {}, "sampler": {}}
MODEL = {"name": "m", "source": "hf://team/own"}
JOB = decode_job("a", {"model": MODEL, "method": {"type": "supervised"}, "roles": ROLES})
HELD = Status(assignments=tuple(Assignment(f"a-{role}-0", role, 0, "n0", 1, 1) for role in ROLES))


def looked_at(status: Status, seconds: float, *without: str) -> tuple[Status, Failure | None]:
    """Return the status after a look at which some roles lack their image, and the failure."""
    pods = {
        f"a-{role}-0": PodView(
            f"a-{role}-0", role, role, 0, unpulled_image=IMAGE if role in without else ""
        )
        for role in ROLES
    }
    now = NOW + datetime.timedelta(seconds=seconds)
    status, _ = with_image_pulls(JOB, status, Observed(pods=pods), now)
    return status, unpulled(status, Observed(pods=pods), now, Limits())


def test_the_time_of_an_image_begins_anew_with_another_pod() -> None:
    status, _ = looked_at(HELD, 0, "trainer")
    status, failure = looked_at(status, 590, "sampler")
    assert failure is None
    status, failure = looked_at(status, 1180, "sampler")
    assert failure is None, "the sampler has lacked its image for 590 s"
    _, failure = looked_at(status, 1190, "sampler")
    assert failure is not None
    assert failure.message.startswith("for 600 s, sampler 0 cannot pull")


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param({"progress": Progress(7, 20, "run-1", NOW, {})}, id="trained"),
        pytest.param({"endpoint": "http://gateway"}, id="serving"),
    ],
)
def test_a_job_that_has_begun_waits_for_its_registry(begun: dict[str, Any]) -> None:
    status, _ = looked_at(replace(HELD, **begun), 0, "trainer")
    status, failure = looked_at(status, 10_000, "trainer")

    assert failure is None
    found = status.condition("ImageUnavailable")
    assert found is not None
    assert found.is_true


def test_an_image_that_comes_in_time_is_told_too(tmp_path: Path) -> None:
    world, process = deployment(tmp_path)
    world.create("trainingjobs", NAMESPACE, manifest(CUSTOM))
    world.silent_pods.add("a-driver-0-e1")
    process.settle(4)
    without_an_image(world, process, "a-driver-0-e1", "driver", "ErrImagePull")
    world.silent_pods.clear()

    process.settle(8)

    assert told(world, "a") == ("Running", "")
    found = condition_of(world, "ImageUnavailable")
    assert (found["status"], found["reason"]) == ("False", "ImagePulled")


def test_an_image_of_the_deployment_is_its_operators_matter(tmp_path: Path) -> None:
    world, process = deployment(tmp_path)
    world.create("trainingjobs", NAMESPACE, manifest(""))
    world.silent_pods.add("a-trainer-0-e1")
    process.settle(4)

    without_an_image(world, process, "a-trainer-0-e1", "trainer", "ErrImagePull")

    assert condition_of(world, "ImageUnavailable")["message"] == (
        "trainer 0 cannot pull the image tinsmith/trainer:1, which is the deployment's: ask its "
        "operators (setting image_repository)"
    )


def test_a_pool_without_its_image_leaves_the_gpus_to_others_and_is_tried_again() -> None:
    world = World()
    world.node("n0", 8)
    process = Process(world)
    world.silent_pods.add("p-trainer-0-e1")
    world.pool("p", 1, 8)
    process.settle(6)
    without_an_image(world, process, "p-trainer-0-e1", "trainer", "ErrImagePull")
    world.job("a", gpus=8)
    process.settle(6)
    assert status_of(world, "a")["phase"] == "Queued"
    waiting_for = status_of(world, "p", "trainerpools")["waitingFor"]
    assert "trainer 0 on node n0 is not ready: ErrImagePull" in waiting_for

    world.now_s += Limits().image_pull_s
    process.settle(12)

    assert status_of(world, "a")["phase"] == "Running"
    status = status_of(world, "p", "trainerpools")
    assert status["phase"] == "Queued"
    assert status["waitingFor"].startswith("for 600 s, trainer 0 cannot pull the image tinsmith")
    assert "ask its operators (setting image_repository)" in status["waitingFor"]
    [found] = [each for each in status["conditions"] if each["type"] == "ImageUnavailable"]
    assert found["status"] == "True"

    world.delete("trainingjobs", NAMESPACE, "a")
    for pod in world.of("pods"):
        world.delete("pods", NAMESPACE, pod["metadata"]["name"], at_once=True)
    world.now_s += Limits().image_pull_s
    process.settle(12)

    assert status_of(world, "p", "trainerpools")["phase"] == "Ready"
