"""Settings of the deployment that the pods of jobs get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tinsmith_controller.pods.author_policy import AuthorPolicy

PORTS: Mapping[str, int] = {
    "trainer": 7071,
    "sampler": 7072,
    "environment": 7073,
    "coordinator": 7074,
}
"""Port by kind of role; each pod has an address of its own."""
METRICS_PORT = 9090
RENDEZVOUS_PORT = 29500

DEFAULT_REQUESTS: Mapping[str, Mapping[str, str]] = {
    "trainer": {"cpu": "4", "memory": "16Gi"},
    "sampler": {"cpu": "4", "memory": "16Gi"},
    "environment": {"cpu": "1", "memory": "1Gi"},
    "coordinator": {"cpu": "500m", "memory": "512Mi"},
    "driver": {"cpu": "500m", "memory": "1Gi"},
    "worker": {"cpu": "500m", "memory": "512Mi"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """Addresses, images and names of secrets.

    Attributes:
        scheduler_address: `host:port` that trainers, samplers and environments register at.
        gateway_address: `host:port` that drivers and agents call.
        pod_root: The root secret that keys of pods are derived from.
        database_secret: Secret, in each namespace of jobs, with `trainer-` and
            `coordinator-database-url`; empty if there is none. A trainer's ledger is a file then,
            and is lost with its pod.
        certificate_secrets: Secrets `<this>-<kind>`, in each namespace of jobs, with those
            of pods; empty where they speak in clear.
        storage_uri: Where checkpoints go.
        storage_secret: Secret with the variables of an S3 client; empty if none are needed.
        storage_claim: Claim, in each namespace of jobs, with the files of a `file://` store; empty
            for an object store. No job may name it.
        image_repository: Images are `<repository>/<pod>:<tag>`.
        image_tag: Of all images.
        trusted_images: See `image_policy`.
        pull_secrets: Names of image pull secrets.
        protected_secrets: Names of other Secrets that no job may ask for.
        author_policy: What jobs may ask of Kubernetes.
        service_account: Of job pods; its token is not mounted.
        volume_size: Limits each volume of a pod that is a part of its node's disk.
        cache_size: Limits the one with what was fetched from a hub.
        device: Where models compute in pods that have a GPU; `cpu` elsewhere.
        has_grpc_probes: Whether the cluster can probe gRPC health (1.24 and later).
        requests: Requests by kind of role, for what a job leaves out.
    """

    scheduler_address: str
    gateway_address: str
    pod_root: str = field(repr=False)
    database_secret: str
    storage_uri: str
    storage_secret: str
    image_repository: str
    image_tag: str
    storage_claim: str = ""
    trusted_images: tuple[str, ...] = ()
    pull_secrets: tuple[str, ...] = ()
    protected_secrets: tuple[str, ...] = ()
    author_policy: AuthorPolicy = field(default_factory=AuthorPolicy)
    service_account: str = ""
    certificate_secrets: str = ""
    volume_size: str = "64Gi"
    cache_size: str = "1Ti"
    device: str = "cuda"
    has_grpc_probes: bool = True
    requests: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: DEFAULT_REQUESTS)

    def own_secrets(self) -> tuple[str, ...]:
        """Return the names of the Secrets that no job may ask for."""
        prefix = self.certificate_secrets
        return (
            self.database_secret,
            self.storage_secret,
            *self.pull_secrets,
            *self.protected_secrets,
            *(f"{prefix}-{kind}" for kind in PORTS if prefix),
        )
