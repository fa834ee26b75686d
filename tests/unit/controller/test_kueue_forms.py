"""The Workload of a job, against the definition of Kueue; and what is told without a Kueue."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest
import yaml
from tests.fakes.chart_harness import ROOT
from tests.fakes.kueue_admitter import condition_of
from tests.unit.controller.cluster_in_memory import GPU, NAMESPACE, World
from tests.unit.controller.kueue_in_memory import QUEUE, KueueCluster
from tests.unit.controller.process_in_memory import Process, status_of

from tinsmith_controller.kube.api_client import ApiError, Json, Resource
from tinsmith_controller.kube.informer import Informer
from tinsmith_controller.kueue.names import QUEUE_LABEL, pod_set_names, workload_name
from tinsmith_jobs.spec import Role

SAMPLES = [
    path
    for path in sorted((ROOT / "k8s/samples").glob("*.yaml"))
    if "kind: TrainingJob" in path.read_text()
]


def schema_of(name: str) -> Json:
    for body in yaml.safe_load_all((ROOT / "tests/fakes/kueue_crds.yaml").read_text()):
        if body["spec"]["names"]["plural"] == name:
            return dict(body["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    raise LookupError(name)


def without_further_fields(schema: Any) -> Any:
    """Return a schema that refuses what the server would drop."""
    if isinstance(schema, list):
        return [without_further_fields(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: without_further_fields(value) for key, value in schema.items()}
    is_closed = "properties" in found and found.get("type") == "object"
    return {**found, "additionalProperties": False} if is_closed else found


def workload_of(world: World) -> Json:
    [found] = world.of("workloads")
    return found


def test_names_are_those_that_kueues_own_integrations_would_give() -> None:
    # sha1 of kind, group, name and uid, a line each, as its `workload_names.go` makes it.
    assert workload_name("sft", "uid-1") == "trainingjob-sft-9b0a9"
    long = workload_name("a" * 90, "uid-1")
    assert len(long) == 63
    assert long != workload_name("a" * 90, "uid-2")


@pytest.mark.parametrize(
    ("roles", "names"),
    [
        pytest.param(["trainer", "agent/red/trainer"], ["trainer", "red-trainer"], id="agents"),
        pytest.param(["agent/Red_1/trainer"], ["red-1-trainer"], id="other-letters"),
        pytest.param(["agent/a/b-c", "agent/a-b/c"], ["a-b-c", "a-b-c-"], id="alike"),
        pytest.param([f"agent/{'x' * 80}/trainer"], ["x" * 57 + "-"], id="long"),
    ],
)
def test_names_of_pod_sets_are_valid_and_differ(roles: list[str], names: list[str]) -> None:
    found = list(pod_set_names([Role(name, "trainer", 1) for name in roles]).values())
    assert all(each.startswith(name) for each, name in zip(found, names, strict=True))
    assert len(set(found)) == len(found)
    assert all(len(each) <= 63 for each in found)


def test_a_workload_has_what_kueue_counts_and_matches() -> None:
    cluster = KueueCluster()
    cluster.world.priority_class("normal", 7)
    cluster.submit(
        "a",
        trainers=2,
        gpus=4,
        samplers=1,
        priorityClassName="normal",
        nodeSelector={"zone": "b"},
        gpuProducts=["NVIDIA-H200"],
    )
    cluster.process.settle(4)
    body = workload_of(cluster.world)
    jsonschema.validate(
        body["spec"], without_further_fields(schema_of("workloads"))["properties"]["spec"]
    )
    metadata = body["metadata"]
    job = cluster.world.get("trainingjobs", NAMESPACE, "a")["metadata"]
    assert metadata["name"] == workload_name("a", job["uid"])
    assert metadata["labels"] == {"kueue.x-k8s.io/job-uid": job["uid"]}
    assert metadata["ownerReferences"][0] == {
        "apiVersion": "tinsmith.dev/v1alpha1",
        "kind": "TrainingJob",
        "name": "a",
        "uid": job["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    spec = body["spec"]
    reference = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "normal"}
    assert (spec["queueName"], spec["priority"], spec["priorityClassRef"]) == (QUEUE, 7, reference)
    sets = {each["name"]: each for each in spec["podSets"]}
    assert {name: each["count"] for name, each in sets.items()} == {
        "trainer": 2,
        "driver": 1,
        "sampler": 1,
    }
    pod = sets["trainer"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["requests"][GPU] == "4"
    assert pod["nodeSelector"] == {"zone": "b"}
    [term] = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"][0]["values"] == ["NVIDIA-H200"]


def test_it_counts_what_its_pods_then_request() -> None:
    cluster = KueueCluster()
    cluster.submit("a", trainers=1, gpus=4, samplers=1)
    cluster.settle()
    counted = {
        each["name"]: each["template"]["spec"]["containers"][0]["resources"]
        for each in cluster.workload("a")["spec"]["podSets"]
    }
    got = {
        pod["metadata"]["annotations"]["tinsmith.dev/role"]: pod["spec"]["containers"][0][
            "resources"
        ]
        for pod in cluster.world.of("pods")
    }
    assert got == counted


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_workload_of_each_sample_is_valid(sample: Any) -> None:
    cluster = KueueCluster()
    [job] = [
        body for body in yaml.safe_load_all(sample.read_text()) if body["kind"] == "TrainingJob"
    ]
    cluster.world.priority_class("high", 1)
    metadata = {**job["metadata"], "labels": {QUEUE_LABEL: QUEUE}}
    cluster.world.create("trainingjobs", NAMESPACE, {**job, "metadata": metadata})
    cluster.process.settle(3)
    status = status_of(cluster.world, metadata["name"])
    if status.get("phase") == "Failed" or "PriorityClass" in status.get("waitingFor", ""):
        assert not cluster.world.of("workloads")
        return
    spec = workload_of(cluster.world)["spec"]
    jsonschema.validate(spec, without_further_fields(schema_of("workloads"))["properties"]["spec"])


def test_what_the_controller_writes_into_a_status_is_valid() -> None:
    cluster = KueueCluster()
    cluster.submit("a", gpus=8)
    cluster.settle()
    cluster.edit_workload("a", active=False)
    cluster.settle()
    cluster.world.edit("trainingjobs", "a", cancel=True)
    cluster.settle()
    body = cluster.workload("a")
    assert condition_of(body, "Finished")
    jsonschema.validate(
        body["status"], without_further_fields(schema_of("workloads"))["properties"]["status"]
    )


class WithoutKueue:
    """An API server that does not know a kind."""

    def __init__(self) -> None:
        self.asked: queue.Queue[str] = queue.Queue()

    def list(self, resource: Resource, namespace: str = "") -> tuple[list[Json], str]:
        self.asked.put(resource.plural)
        raise ApiError(404, "", "404 page not found")

    def watch(
        self, resource: Resource, namespace: str, version: str, *, timeout_s: int
    ) -> Iterator[tuple[str, Json]]:
        raise AssertionError("there is nothing to watch")


def test_an_informer_tells_that_the_server_does_not_know_its_kind() -> None:
    told: queue.Queue[bool] = queue.Queue()
    server = WithoutKueue()
    resource = Resource("kueue.x-k8s.io", "v1beta2", "workloads")
    informer = Informer(
        server, resource, ("",), lambda _: 1, lambda *_: None, on_absent=lambda: told.put(True)
    )
    informer.start()
    assert told.get(timeout=10)
    assert not informer.wait_synced(0)
    informer.stop()


def test_without_its_resources_one_line_names_the_remedy_and_other_jobs_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.node("n0")
    process = AbsentKueue(world)
    kueue = process.caches.kueue
    assert kueue is not None
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            kueue.note_absence()
    [line] = [record for record in caplog.records if "kueue" in record.getMessage()]
    assert "install Kueue 0.15 or later" in line.getMessage()

    world.job("plain", gpus=1)
    world.job("queued", gpus=1)
    body = world.get("trainingjobs", NAMESPACE, "queued")
    body["metadata"]["labels"] = {QUEUE_LABEL: QUEUE}
    world.store("trainingjobs", NAMESPACE, body)
    process.settle()
    assert status_of(world, "plain")["phase"] == "Running"
    assert "set controller.settings.kueue to false" in status_of(world, "queued")["waitingFor"]
    assert not world.get("trainingjobs", NAMESPACE, "queued")["spec"].get("suspend")


class AbsentKueue(Process):
    """A controller whose cluster has none of Kueue's resources."""

    def __init__(self, world: World) -> None:
        super().__init__(world, has_kueue=True)

    def relist(self, plural: str) -> None:
        if plural in ("workloads", "resourceflavors", "workloadpriorityclasses"):
            self.cut_off.discard(plural)
            self.cursors[plural] = 0
        else:
            super().relist(plural)


def test_without_the_setting_nothing_of_kueue_is_read() -> None:
    process = Process(World())
    assert process.caches.kueue is None
    assert not [each for each in process.informers if each.group == "kueue.x-k8s.io"]
