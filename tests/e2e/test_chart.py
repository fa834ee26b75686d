"""The chart against a real API server: install, upgrade, rollback, rights, pods that come up."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

import tinsmith
from tests.e2e.cert_manager import install_kinds
from tests.e2e.cluster import FakeNode, Image, TestCluster, path
from tests.e2e.release import CEL_VERSION, DEPLOYMENTS, Release, new_release
from tests.fakes.chart_harness import (
    ROOT,
    VALUE_SETS,
    load_values,
    merge,
    program_of,
    render,
)
from tests.fakes.s3_server import CREDENTIALS, S3Server, running_s3_server
from tinsmith.v1 import checkpoint_pb2, checkpoint_pb2_grpc

RENDERED_VERSION = (1, 24)
"""What `k8s/install.yaml` is for."""
TAINT = {"key": "tinsmith.dev/test", "value": "chart", "effect": "NoSchedule"}
"""Keeps the pods of other releases off the node of the test that runs them."""


@pytest.fixture(scope="module", autouse=True)
def _cert_manager(cluster: TestCluster) -> None:
    install_kinds(cluster)


@pytest.fixture
def release(cluster: TestCluster) -> Iterator[Release]:
    with new_release(cluster) as made:
        yield made


@pytest.fixture
def store() -> Iterator[S3Server]:
    with running_s3_server() as server:
        server.create_bucket("tinsmith")
        yield server


@pytest.fixture(scope="module")
def installed(cluster: TestCluster) -> Iterator[Release]:
    """One that tests look at and leave as it is."""
    with new_release(cluster) as made:
        made.install(load_values("trial-values"))
        yield made


def test_keys_are_drawn_once_and_survive_everything(release: Release) -> None:
    trial = load_values("trial-values")
    release.install(trial)
    keys = release.secret("tinsmith-keys")
    jobs_keys = release.secret("tinsmith-keys", of_jobs=True)
    store = release.secret("tinsmith-storage", of_jobs=True)
    assert jobs_keys == {
        name: keys[name] for name in ("coordinator-database-url", "trainer-database-url")
    }
    roles = ("gateway", "coordinator", "environment", "trainer")
    keeping = ("scheduler", "gateway", "coordinator", "trainer")
    assert set(keys) == {
        "pod-key",
        "bootstrap-key",
        *(f"{role}-key" for role in roles),
        *(f"{role}-database-url" for role in keeping),
    }

    release.upgrade(merge(trial, {"scheduler": {"drainTimeoutSeconds": 45}}))
    assert release.secret("tinsmith-keys") == keys
    assert release.secret("tinsmith-keys", of_jobs=True) == jobs_keys
    assert release.secret("tinsmith-storage", of_jobs=True) == store
    scheduler = release.find("apps/v1", "deployments", "tinsmith-scheduler")
    assert scheduler is not None
    assert scheduler["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 75

    release.config.rollback(release.name)
    assert release.secret("tinsmith-keys") == keys
    scheduler = release.find("apps/v1", "deployments", "tinsmith-scheduler")
    assert scheduler is not None
    assert scheduler["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 60

    release.config.uninstall(release.name)
    assert release.find("apps/v1", "deployments", "tinsmith-scheduler") is None
    # Keys, and what jobs made, outlive the release; the same release takes them up again.
    assert release.secret("tinsmith-keys") == keys
    assert release.cluster.api.find(f"/api/v1/namespaces/{release.jobs_namespace}")
    release.install(trial)
    assert release.secret("tinsmith-keys") == keys


def test_the_definitions_come_with_the_first_install(installed: Release) -> None:
    for plural in ("trainingjobs", "trainerpools"):
        url = path("tinsmith.dev/v1alpha1", plural, installed.jobs_namespace)
        assert installed.cluster.api.list(url) == []


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_server_knows_every_field(installed: Release, name: str) -> None:
    """`kubectl` validates against the schema of the server, which also refuses what is wrong."""
    entry = {"name": installed.jobs_namespace, "project": "default"}
    major, minor = installed.cluster.version
    changes = {
        "kubernetesVersion": f"{major}.{minor}",
        "jobs": {"namespaces": [entry]},
        # The server knows neither the kinds of the Prometheus operator nor Grafana's namespace.
        "monitoring": {"monitors": "never", "rules": "never", "dashboards": {"namespace": ""}},
    }
    values = merge(load_values(name), changes)
    for pool in values.get("pools", {}).values():
        pool.pop("namespace", None)
    manifests = render(values, release="other", namespace=installed.namespace)
    installed.cluster.kubectl(
        *("apply", "--dry-run=server", "--validate=true", "-f", "-"),
        stdin=yaml.safe_dump_all(manifests),
    )


RIGHTS = [
    ("controller", "jobs", "list trainingjobs.tinsmith.dev", True),
    ("controller", "jobs", "patch trainingjobs.tinsmith.dev/status", True),
    ("controller", "jobs", "create trainingjobs.tinsmith.dev", False),
    ("controller", "jobs", "delete trainerpools.tinsmith.dev", False),
    ("controller", "jobs", "create pods", True),
    ("controller", "jobs", "delete pods", True),
    ("controller", "jobs", "patch pods/status", False),
    ("controller", "jobs", "create pods/exec", False),
    ("controller", "jobs", "get pods/log", False),
    ("controller", "jobs", "get secrets", True),
    ("controller", "jobs", "list secrets", False),
    ("controller", "jobs", "watch secrets", False),
    ("controller", "jobs", "create events", True),
    ("controller", "own", "get secrets", False),
    ("controller", "own", "create pods", False),
    ("controller", "own", "create leases.coordination.k8s.io", True),
    ("controller", "own", "update leases.coordination.k8s.io/tinsmith-controller", True),
    ("controller", "own", "update leases.coordination.k8s.io/other", False),
    ("controller", "kube-system", "create pods", False),
    ("controller", "kube-system", "get secrets", False),
    ("controller", "", "list nodes", True),
    ("controller", "", "patch nodes", False),
    ("controller", "", "list pods", True),
    ("controller", "", "list priorityclasses.scheduling.k8s.io", True),
    ("scheduler", "jobs", "create trainingjobs.tinsmith.dev", True),
    ("scheduler", "jobs", "patch trainingjobs.tinsmith.dev/status", False),
    ("scheduler", "jobs", "get pods/log", True),
    ("scheduler", "jobs", "create pods", False),
    ("scheduler", "jobs", "get secrets", False),
    ("scheduler", "", "list nodes", False),
    ("gateway", "jobs", "list pods", False),
    ("environment", "own", "get secrets", False),
    ("job", "jobs", "get secrets", False),
    ("job", "jobs", "list trainingjobs.tinsmith.dev", False),
]


@pytest.mark.parametrize(("account", "where", "what", "may"), RIGHTS)
def test_rights_are_what_the_work_needs(
    installed: Release, account: str, where: str, what: str, may: bool
) -> None:
    verb, _, resource = what.partition(" ")
    kind, _, rest = resource.partition("/")
    namespaces = {"jobs": installed.jobs_namespace, "own": installed.namespace}
    is_subresource = rest in ("status", "log", "exec")
    group = kind.partition(".")
    attributes = {
        "verb": verb,
        "resource": group[0],
        "group": group[2],
        "subresource": rest if is_subresource else "",
        "name": "" if is_subresource else rest,
        "namespace": namespaces.get(where, where),
    }
    home = installed.jobs_namespace if account == "job" else installed.namespace
    review = installed.cluster.api.create(
        "/apis/authorization.k8s.io/v1/subjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{home}:tinsmith-{account}",
                "groups": ["system:serviceaccounts", f"system:serviceaccounts:{home}"],
                "resourceAttributes": attributes,
            },
        },
    )
    assert review["status"]["allowed"] is may


def test_the_samples_are_accepted(installed: Release) -> None:
    cluster = installed.cluster
    for sample in sorted((ROOT / "k8s/samples").glob("*.yaml")):
        cluster.kubectl("apply", "-n", installed.jobs_namespace, "-f", str(sample))
    jobs = cluster.api.list(path("tinsmith.dev/v1alpha1", "trainingjobs", installed.jobs_namespace))
    assert len(jobs) == len(list((ROOT / "k8s/samples").glob("*.yaml"))) - 1
    cluster.kubectl("delete", "-n", installed.jobs_namespace, "-f", str(ROOT / "k8s/samples"))


def test_the_plain_manifests_are_applied_by_one_command(
    cluster: TestCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "k8s"
    shutil.copytree(ROOT / "k8s", folder)
    if cluster.version < RENDERED_VERSION:
        sys.path.insert(0, str(ROOT / "helm"))
        major, minor = cluster.version
        files = importlib.import_module("render").generated_files(f"{major}.{minor}")
        (folder / "install.yaml").write_text(files[ROOT / "k8s/install.yaml"])
    # Servers that know no rules in CEL drop them, but kubectl finds them unknown first.
    apply = ("apply", "-k", str(folder), f"--validate={cluster.version >= CEL_VERSION}".lower())
    try:
        cluster.kubectl(*apply)
        # Again, as an upgrade does: nothing is in its own way.
        assert "created" not in cluster.kubectl(*apply)
        for pod in (*DEPLOYMENTS, "controller"):
            assert cluster.api.find(path("apps/v1", "deployments", "tinsmith", f"tinsmith-{pod}"))
    finally:
        for name in ("tinsmith", "tinsmith-jobs"):
            if cluster.api.find(f"/api/v1/namespaces/{name}"):
                cluster.api.delete(f"/api/v1/namespaces/{name}")


@pytest.mark.timeout(1200)
def test_the_pods_of_a_release_come_up_and_are_replaced_by_an_upgrade(
    release: Release, postgres_url: str, store: S3Server
) -> None:
    """Real processes, with the settings, Secrets, probes and Services of the chart."""
    cluster = release.cluster
    images = {
        f"localhost/tinsmith/{program}": Image(
            entrypoint=["python", "-m", f"tinsmith_{program}"],
            env={
                "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            },
        )
        for program in map(program_of, (*DEPLOYMENTS, "controller"))
    }
    values: dict[str, Any] = {
        "database": {"url": postgres_url},
        "storage": {"uri": store.uri("tinsmith"), "env": CREDENTIALS},
        "gateway": {"listenHost": "$(POD_IP)"},
        "environment": {"settings": {"num_workers": 1}},
    }
    tolerations = {"tolerations": [{"key": TAINT["key"], "operator": "Exists"}]}
    values = merge(values, dict.fromkeys((*DEPLOYMENTS, "controller"), tolerations))
    node = FakeNode(name="chart-node", taints=[TAINT])
    with cluster.kubelet([node], images=images) as kubelet:
        release.install(values)
        try:
            for pod in (*DEPLOYMENTS, "controller"):
                release.wait_for_rollout(pod)
            before = _pods(release)
            _play(release)
            _knock(release)

            # One works, a second stands by: the new one is ready only once the old one has ended.
            changes = {pod: {"podAnnotations": {"example.com/round": "2"}} for pod in DEPLOYMENTS}
            release.upgrade(merge(values, changes))
            for pod in DEPLOYMENTS:
                release.wait_for_rollout(pod)
            after = _pods(release)
            assert before.keys() == after.keys()
            # Its service account has every right that its work takes.
            log = kubelet.logs(release.namespace, after["controller"])
            assert "forbidden" not in log.lower()
            assert all(before[pod] != after[pod] for pod in DEPLOYMENTS)
            _play(release)
        except BaseException as error:
            for pod, name in _pods(release).items():
                error.add_note(f"--- {pod}\n{kubelet.logs(release.namespace, name)[-4000:]}")
            raise
        finally:
            release.config.uninstall(release.name)


def _pods(release: Release) -> dict[str, str]:
    """Return the name of a pod of each component that is not on its way out."""
    pods = release.cluster.api.list(path("v1", "pods", release.namespace))
    return {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["name"]
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    }


def _knock(release: Release) -> None:
    """Speak to a pod behind the gateway: with a certificate it answers, without one it does not."""
    service = release.find("v1", "services", "tinsmith-scheduler")
    assert service is not None
    address = f"{service['spec']['clusterIP']}:7070"
    channels = [release.open_channel(address, "scheduler"), grpc.insecure_channel(address)]
    answers = []
    for channel in channels:
        try:
            request = health_pb2.HealthCheckRequest()
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            answers.append("answered")
        except grpc.RpcError:
            answers.append("refused")
        channel.close()
    assert answers == ["answered", "refused"]


def _play(release: Release) -> None:
    """Use the operators' key: gateway, scheduler, checkpoints and environment answer."""
    service = release.find("v1", "services", "tinsmith-gateway")
    assert service is not None
    address = f"{service['spec']['clusterIP']}:7077"
    key = release.secret("tinsmith-keys")["bootstrap-key"]

    def begin() -> bool:
        # A pod is ready a moment before the scheduler has heard of it.
        with (
            contextlib.suppress(tinsmith.errors.FailedPreconditionError),
            tinsmith.Client(address=address, api_key=key) as client,
            client.environments.create_instance("math", seed=1) as instance,
        ):
            return instance.name.startswith("projects/default/")
        return False

    def list_checkpoints() -> bool:
        with grpc.insecure_channel(address) as channel:
            try:
                answer = checkpoint_pb2_grpc.CheckpointServiceStub(channel).ListCheckpoints(
                    checkpoint_pb2.ListCheckpointsRequest(parent="projects/default/trainingRuns/-"),
                    metadata=(("authorization", f"Bearer {key}"),),
                    timeout=10,
                )
            except grpc.RpcError as error:
                # Until the gateway has heard of the pod, or that the one before is gone.
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
        return not answer.checkpoints

    release.cluster.wait_for(begin, "an episode through the gateway", timeout_s=60)
    # There is no other trainer that could answer.
    release.cluster.wait_for(list_checkpoints, "the checkpoint server", timeout_s=60)
