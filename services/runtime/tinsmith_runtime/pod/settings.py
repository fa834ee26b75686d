"""Settings that pods have in common: parts that the settings class of a pod is put together from.

A part has empty `__slots__`, because a class cannot have two bases with slots of their own; the
frozen class of the pod makes the slots of all fields. A part checks nothing by itself: the
`__post_init__` of the pod calls its `check_...` method.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tinsmith_runtime.rpc.pod_tls import PodTls
from tinsmith_runtime.rpc.server import ServerConfig


@dataclass(frozen=True, kw_only=True)
class CertificateConfig:
    """How a pod shows to other pods what it is."""

    __slots__ = ()

    pod_certificate: Path | None = None
    """PEM file of the certificate that other pods are shown; without one pods speak in clear."""
    pod_certificate_key: Path | None = None
    """PEM file of its private key."""
    pod_authority: Path | None = None
    """PEM file of the authority that the certificates of all pods come from."""

    def tls(self) -> PodTls | None:
        """Return the certificate of the pod; None if it has none.

        Raises:
            ConfigError: If a part of it is missing.
        """
        return PodTls.from_settings(
            self.pod_certificate, self.pod_certificate_key, self.pod_authority
        )


@dataclass(frozen=True, kw_only=True)
class ListenConfig(CertificateConfig):
    """Where a pod listens, and how it ends."""

    __slots__ = ()

    pod_key: str = field(default="", repr=False)
    """Key of this pod, or the root secret of the deployment, from which its key is derived then."""
    previous_pod_key: str = field(default="", repr=False)
    """The root secret before the last rotation; its keys are valid as long as it is given."""
    listen_address: str = "127.0.0.1:0"
    """`host:port`; port 0 takes a free one."""
    metrics_address: str | None = None
    """`host:port` of the Prometheus endpoint; empty serves none."""
    drain_timeout_s: float = 30.0
    """Time that running calls get to finish after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class GrpcConfig(ListenConfig):
    """Settings of a pod that serves gRPC alone."""

    __slots__ = ()

    max_message_bytes: int = 64 * 2**20
    """Limit of one request or response."""

    def server(self) -> ServerConfig:
        """Return the settings of the gRPC server.

        Raises:
            ConfigError: If an address is not `host:port`, or a limit is not positive.
        """
        return ServerConfig(
            listen_address=self.listen_address,
            metrics_address=self.metrics_address,
            drain_timeout_s=self.drain_timeout_s,
            max_message_bytes=self.max_message_bytes,
            tls=self.tls(),
        )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(GrpcConfig):
    """Settings of a pod that the scheduler lists."""

    __slots__ = ()

    worker_name: str
    """Identity at the scheduler; must be the same after a restart."""
    pool: str = ""
    """The scheduler sends only callers here whose key is bound to it; empty is for all others."""
    scheduler_address: str = ""
    """`host:port` of the scheduler."""


@dataclass(frozen=True, kw_only=True)
class DatabaseConfig:
    """Settings of a pod that keeps its state in a database."""

    __slots__ = ()

    data_dir: Path
    """Folder of the database, unless that is at `database_url`."""
    database_url: str = field(default="", repr=False)
    """`postgresql://...`; a second pod of the kind stands by on it until the first has ended."""
