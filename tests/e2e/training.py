"""A whole deployment for end-to-end tests: real services, PostgreSQL and S3; pods as processes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tinsmith
from tests.e2e.cluster import FakeNode, Image, Json, Kubelet, TestCluster, path
from tests.e2e.deployment import (
    DrainedPod,
    Jobs,
    controller_process,
    install_resources,
)
from tests.fakes.chart_harness import load_values, merge, of_kind, render
from tests.fakes.postgres import new_server
from tests.fakes.s3_server import CREDENTIALS, S3Server, running_s3_server
from tests.support.pods import PodDeployment
from tinsmith.names import DEFAULT_PROJECT
from tinsmith_local.certificates import make_certificates
from tinsmith_local.database_users import make_database_users
from tinsmith_local.made_models import MADE_MODELS

MODEL = "tiny"
TINY: Json = {"requests": {"cpu": "500m", "memory": "1Gi"}}
POD_SETTINGS = [
    {"name": "TINSMITH_NUM_THREADS", "value": "1"},
    # Steps take long enough to be interrupted, however fast the machine is.
    {"name": "TINSMITH_FAILPOINTS", "value": "trainer.compute=sleep:0.5"},
]
_BUCKET = "checkpoints"


class TrainingDeployment:
    """Services outside of the cluster, and what jobs inside of it need.

    Attributes:
        jobs: The jobs of the namespace.
        address: Of the gateway.
        api_key: Of the project of the namespace.
        store: Where checkpoints go.
        models: The folder of what pods find by `pvc://models/NAME`.
        controller: May be killed and started again; None where it is a pod.
    """

    def __init__(
        self,
        jobs: Jobs,
        *,
        address: str,
        api_key: str,
        store: S3Server,
        models: Path,
        controller: DrainedPod | None = None,
    ) -> None:
        self.jobs = jobs
        self.store = store
        self.models = models
        self.controller = controller
        self.address = address
        self.api_key = api_key

    def client(self) -> tinsmith.Client:
        """Return a client such as a laptop has."""
        return tinsmith.Client(self.address, self.api_key)

    def role(self, gpus: int = 1, **further: Any) -> Json:
        """Return a role of tiny pods."""
        return {"gpus": gpus, "resources": TINY, "template": {"env": POD_SETTINGS}, **further}

    def supervised(self, *, num_steps: int, every_steps: int = 4, **further: Any) -> Json:
        """Return the spec of a supervised job of tiny pods."""
        return {
            "method": {
                "type": "supervised",
                "maxSteps": num_steps,
                "parameters": {"batch_size": 4, "max_tokens": 8, "seed": 7},
            },
            "model": {"name": MODEL, "source": f"pvc://models/{MODEL}"},
            "roles": {
                "trainer": self.role(),
                "sampler": self.role(),
                "driver": {"resources": {"requests": {"cpu": "100m", "memory": "128Mi"}}},
            },
            "checkpoint": {"everySteps": every_steps},
            **further,
        }

    def final_weights(self, job: str) -> dict[str, bytes]:
        """Return the files of the final checkpoint of a job, read from the object store."""
        return self.weights(self.jobs.status(job)["checkpoint"]["final"]["name"])

    def weights(self, name: str) -> dict[str, bytes]:
        """Return the files of a checkpoint, read from the object store."""
        with tempfile.TemporaryDirectory() as folder, self.client() as client:
            client.checkpoints.download(name, Path(folder) / "checkpoint")
            files = sorted((Path(folder) / "checkpoint").glob("*.safetensors"))
            return {file.name: file.read_bytes() for file in files}


@contextlib.contextmanager
def process_nodes(
    cluster: TestCluster,
    nodes: Sequence[FakeNode],
    *,
    environment: Mapping[str, str] | None = None,
    programs: Mapping[str, Path] | None = None,
) -> Iterator[Kubelet]:
    """Yield nodes whose pods are processes.

    Args:
        cluster: Where they are.
        nodes: The nodes.
        environment: Variables of all images.
        programs: By name of an image of ones own, the folder of its packages.
    """
    images = {
        **{f"tinsmith/{pod}": _image(f"tinsmith_{pod}", environment) for pod in _PODS},
        "tinsmith/driver": _image("tinsmith.driver.main", environment),
        **{name: _image("this", environment, folder) for name, folder in (programs or {}).items()},
    }
    with cluster.kubelet(nodes, images=images) as kubelet:
        yield kubelet


@contextlib.contextmanager
def training_deployment(
    cluster: TestCluster,
    namespace: str,
    folder: Path,
    *,
    has_kueue: bool = False,
    **settings: object,
) -> Iterator[TrainingDeployment]:
    """Yield a deployment whose jobs run in a namespace, on nodes that are there.

    Args:
        cluster: The Kubernetes API.
        namespace: Of its jobs.
        folder: For files.
        has_kueue: Whether its operators use Kueue.
        **settings: Further ones of the controller.
    """
    install_resources(cluster)
    with contextlib.ExitStack() as closing:
        store = closing.enter_context(running_s3_server())
        store.create_bucket(_BUCKET)
        database = new_server()
        closing.callback(database.remove)
        users = asyncio.run(make_database_users(database.create_database()))
        urls = {f"{user.role}-database-url": user.url for user in users}
        storage_uri = store.uri(_BUCKET)
        create_secret(cluster, namespace, "database", urls)
        create_secret(cluster, namespace, "storage", CREDENTIALS)
        certificates = folder / "certificates"
        make_certificates(certificates, namespace=namespace)
        for kind in _PODS:
            create_secret(cluster, namespace, f"pods-{kind}", _files(certificates / kind))
        of_services: Mapping[str, Mapping[str, object]] = {
            "scheduler": {
                "job_launcher": "kubernetes",
                "job_namespaces": f"{DEFAULT_PROJECT}={namespace}",
            },
            "gateway": {},
            # Answers for checkpoints of ended jobs: it has no base model, so it gets no runs.
            "trainer": {"worker_name": "checkpoints"},
            # On the same database as coordinators of jobs, which must not wait for its lock.
            "coordinator": {"worker_name": "shared"},
        }
        services = PodDeployment(
            folder,
            {},
            of_services,
            settings={
                pod: {"database_url": urls[f"{pod}-database-url"], **further}
                for pod, further in of_services.items()
            },
            certificates=certificates,
            storage_uri=storage_uri,
            make=DrainedPod,
        )
        rights = _service_account(cluster, namespace, "scheduler")
        services.processes["scheduler"].variables["KUBECONFIG"] = str(rights)
        services.processes["trainer"].variables.update(CREDENTIALS)
        closing.enter_context(services)
        models = provide_models(cluster, namespace)
        controller = controller_process(
            cluster,
            folder,
            namespace,
            services.scheduler_address,
            gateway_address=services.gateway_address,
            database_secret_name="database",
            pod_certificate_secrets="pods",
            **services.certificate_of("controller"),
            projects=f"{namespace}={DEFAULT_PROJECT}",
            storage_uri=storage_uri,
            storage_secret_name="storage",
            trusted_images="*",
            lease_name="tinsmith-controller",
            # A machine that is busy with pods must not cost it the lease: it is not started again.
            lease_ttl_s=30,
            kueue=has_kueue,
            kubeconfig=_service_account(cluster, namespace, "controller", has_kueue=has_kueue),
            **settings,
        )
        closing.enter_context(controller)
        yield TrainingDeployment(
            Jobs(cluster, namespace),
            address=services.address,
            api_key=services.api_key,
            store=store,
            models=models,
            controller=controller,
        )


_PODS = ("trainer", "sampler", "environment", "coordinator")


def _files(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def two_nodes(name: str, *, gpus: int = 2) -> list[FakeNode]:
    """Return nodes `<name>-0` and `-1` of some GPUs each."""
    return [FakeNode(name=f"{name}-{i}", gpus=gpus) for i in range(2)]


def _image(
    module: str, environment: Mapping[str, str] | None = None, programs: Path | None = None
) -> Image:
    # Pods have no variables of ours; the code is where that of the tests is.
    env = {
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(programs or ""), *sys.path])),
        **(environment or {}),
    }
    return Image(entrypoint=(sys.executable, "-m", module), env=env)


def create_secret(cluster: TestCluster, namespace: str, name: str, values: dict[str, str]) -> None:
    """Create a Secret."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    body = {"metadata": {"name": name}, "data": data}
    cluster.api.create(path("v1", "secrets", namespace), body)


def _service_account(
    cluster: TestCluster, namespace: str, pod: str, *, has_kueue: bool = False
) -> Path:
    """Return a kubeconfig with the rights that the chart gives a pod, and no others."""
    settings = {"controller": {"settings": {"kueue": has_kueue}}}
    manifests = render(merge(load_values("trial-values"), settings))
    account = f"tinsmith-{pod}"
    rules: dict[str, list[Json]] = {"Role": [], "ClusterRole": []}
    for binding in of_kind(manifests, "RoleBinding", "ClusterRoleBinding"):
        if account in {subject["name"] for subject in binding["subjects"]}:
            reference, where = binding["roleRef"], binding["metadata"].get("namespace")
            for role in of_kind(manifests, reference["kind"]):
                found = role["metadata"]
                if (found["name"], found.get("namespace")) == (reference["name"], where):
                    rules[reference["kind"]] += role["rules"]
    cluster.api.create(path("v1", "serviceaccounts", namespace), {"metadata": {"name": account}})
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    for kind, scope in (("Role", namespace), ("ClusterRole", "")):
        name = account if scope else f"{namespace}-{account}"
        api, plural = "rbac.authorization.k8s.io/v1", f"{kind.lower()}s"
        metadata = {"name": name}
        cluster.api.create(path(api, plural, scope), {"metadata": metadata, "rules": rules[kind]})
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
        cluster.api.create(
            path(api, f"{kind.lower()}bindings", scope),
            {"metadata": metadata, "roleRef": reference, "subjects": [subject]},
        )
    return cluster.service_account_kubeconfig(namespace, account)


def provide_models(cluster: TestCluster, namespace: str) -> Path:
    """Put the tiny models on a volume that pods find by `pvc://models/NAME`; return its folder."""
    folder = claimed_folder(cluster, namespace, "models")
    for name, make in MADE_MODELS.items():
        (make(folder / name) / "model.safetensors").chmod(0o644)  # pods run as a user of their own
    return folder


def claimed_folder(cluster: TestCluster, namespace: str, name: str) -> Path:
    """Claim a volume, and return the folder of this machine that it is."""
    url = path("v1", "persistentvolumeclaims", namespace)
    spec = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.api.create(url, {"metadata": {"name": name}, "spec": {**spec, "storageClassName": ""}})
    volume = cluster.wait_for(
        lambda: cluster.api.get(f"{url}/{name}")["spec"].get("volumeName"), "a volume"
    )
    found = cluster.api.get(path("v1", "persistentvolumes", "", volume))
    return Path(found["spec"]["hostPath"]["path"])
