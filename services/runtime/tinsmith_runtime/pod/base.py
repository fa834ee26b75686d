"""What is the same in all pods, and in those that the scheduler lists.

A pod whose start fails or is cancelled gives back what it opened, so that another one can have it.

The order of a listed pod is that of its base. What it needs is opened before it serves, and it is
listed after. At the end the listing goes first, then the server, then what was opened. It adds its
services to the server in its constructor, or in `_open` if they need what is opened there.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

from tinsmith.v1 import scheduler_pb2, workers_pb2
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.pod.settings import WorkerConfig
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole
from tinsmith_runtime.rpc.scheduler_client import SchedulerClient, WorkerRegistration
from tinsmith_runtime.rpc.server import PodServer


class Pod(abc.ABC):
    """What a process serves until a signal."""

    async def start(self) -> None:
        """Serve; where one process works at a time, wait for the one before to end.

        Raises:
            ConfigError: If an address is in use, or something that the pod needs cannot be used.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    @abc.abstractmethod
    async def stop(self) -> None:
        """Refuse new calls, let running ones finish, close; repeating it changes nothing.

        Also right after a start that failed.
        """

    @abc.abstractmethod
    async def _start(self) -> None:
        """Open what calls need, and serve."""


class WorkerPod(Pod):
    """A pod that the scheduler lists.

    Args:
        config: Its settings.
        role: What it is.
        domain: The `ErrorInfo.domain`, such as `trainer.tinsmith`.
        tokenizers: Tokenizer files by base model, which the scheduler hands out.

    Raises:
        ConfigError: If the address of the scheduler or the key of the pods is missing.
    """

    def __init__(
        self,
        config: WorkerConfig,
        role: workers_pb2.Worker.Role.ValueType,
        *,
        domain: str,
        tokenizers: Mapping[str, scheduler_pb2.Tokenizer] | None = None,
    ) -> None:
        if not config.scheduler_address or not config.pod_key:
            raise ConfigError(f"the {domain.partition('.')[0]} needs scheduler_address and pod_key")
        self._listing = workers_pb2.Worker(
            name=f"workers/{config.worker_name}", role=role, pool=config.pool
        )
        self._tokenizers = tokenizers
        self._credentials = PodCredentials.read(
            config.pod_key,
            PodRole(domain.partition(".")[0]),
            pool=config.pool,
            previous=config.previous_pod_key,
            tls=config.tls(),
        )
        self._scheduler = SchedulerClient(config.scheduler_address, self._credentials)
        self._server = PodServer(
            config.server(), domain=domain, authenticator=self._scheduler.authenticator()
        )
        self._registration: WorkerRegistration | None = None

    @property
    def address(self) -> str:
        """`host:port` that the pod listens on; empty before `start`."""
        return self._server.address

    @property
    def metrics_address(self) -> str:
        """`host:port` of the Prometheus endpoint; empty if there is none."""
        return self._server.metrics_address

    async def _start(self) -> None:
        await self._open()
        await self._server.start()
        self._listing.address = self.address
        self._listing.MergeFrom(self._describe())
        self._registration = WorkerRegistration(
            self._scheduler, self._listing, self._tokenizers, self._load
        )
        self._registration.start()

    async def wait_listed(self, timeout_s: float) -> None:
        """Return once the scheduler lists this pod; see `WorkerRegistration.wait_listed`."""
        if self._registration is not None:
            await self._registration.wait_listed(timeout_s)

    async def stop(self) -> None:
        """Leave the listing, refuse new calls, let running ones finish, close."""
        if self._registration is not None:
            await self._registration.stop()
        await self._server.stop()
        await self._close()
        await self._scheduler.close()

    @abc.abstractmethod
    async def _open(self) -> None:
        """Make ready what calls need; nothing is served before it returns."""

    @abc.abstractmethod
    async def _close(self) -> None:
        """Close what `_open` opened, wholly or in part, after the last call."""

    def _describe(self) -> workers_pb2.Worker:
        """Return what the listing says beside name, role, address and pool."""
        return workers_pb2.Worker()

    def _load(self) -> scheduler_pb2.SamplerLoad | None:
        """Return what each heartbeat says that there is to do; None for a pod that says nothing."""
        return None
