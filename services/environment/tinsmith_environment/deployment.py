"""An environment pod with what ties it to a deployment: credentials, server, registration."""

from __future__ import annotations

from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.pod import EnvironmentPod
from tinsmith_environment.rpc import codec
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.scheduler_client import SchedulerClient, WorkerRegistration
from tinsmith_runtime.rpc.server import PodServer


class EnvironmentDeployment:
    """One environment pod of a deployment, from its settings to its listing at the scheduler."""

    def __init__(self, config: EnvironmentConfig) -> None:
        if not config.scheduler_address or not config.pod_key:
            raise ConfigError("an environment pod needs scheduler_address and pod_key")
        self._scheduler = SchedulerClient(config.scheduler_address, pod_key=config.pod_key)
        self._server = PodServer(
            config.server(), domain=codec.DOMAIN, authenticator=self._scheduler.authenticator()
        )
        self._pod = EnvironmentPod(config, self._server)
        self._registration: WorkerRegistration | None = None

    @property
    def address(self) -> str:
        """`host:port` of the server."""
        return self._server.address

    async def start(self) -> None:
        """Start the workers, serve, register."""
        await self._pod.start()
        self._registration = WorkerRegistration(self._scheduler, self._pod.describe())
        self._registration.start()

    async def wait_listed(self, timeout_s: float) -> None:
        """Return once the scheduler lists this pod; see `WorkerRegistration.wait_listed`."""
        if self._registration is not None:
            await self._registration.wait_listed(timeout_s)

    async def stop(self) -> None:
        """Finish running calls, then end the workers."""
        if self._registration is not None:
            await self._registration.stop()
        await self._pod.stop()
        await self._scheduler.close()
