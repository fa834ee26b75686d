"""Wires an environment pod: worker processes, registry, instances, servicer."""

from __future__ import annotations

import asyncio
import logging

from tinsmith.names import worker_tag
from tinsmith.v1 import environment_pb2_grpc, workers_pb2
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.instances.instance import InstanceLimits
from tinsmith_environment.instances.instances import InstanceRegistry
from tinsmith_environment.registry import EnvironmentRegistry, load_specs, modules_of
from tinsmith_environment.rpc import codec
from tinsmith_environment.rpc.servicer import EnvironmentServicer
from tinsmith_environment.workers.confinement import ProcessLimits
from tinsmith_environment.workers.pool import WorkerPool
from tinsmith_runtime.pod.base import WorkerPod

logger = logging.getLogger(__name__)

_MAX_SWEEP_INTERVAL_S = 10.0


class EnvironmentPod(WorkerPod):
    """An environment pod, from its settings to its server."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        super().__init__(config, workers_pb2.Worker.ROLE_ENVIRONMENT, domain=codec.DOMAIN)
        self._pool = WorkerPool(
            num_workers=config.effective_num_workers,
            step_timeout_s=config.step_timeout_s,
            start_timeout_s=config.worker_start_timeout_s,
            python_path=config.python_path,
            show_output=config.show_worker_output,
            max_workers=config.max_workers,
            max_project_workers=config.max_project_workers,
            idle_s=config.worker_idle_s,
            modules=modules_of(config),
            max_output_bytes=config.max_worker_output_bytes,
            max_reply_bytes=config.max_worker_reply_bytes,
            limits=ProcessLimits(
                max_processes=config.max_worker_processes,
                address_space_bytes=config.max_worker_memory_bytes,
                file_bytes=config.max_worker_file_bytes,
                open_files=config.max_worker_open_files,
                cpu_s=config.max_worker_cpu_s,
            ),
            variables=config.further_variables(),
            closed_folders=config.closed_folder_list(),
            uid_base=config.worker_uid_base,
        )
        self._environments = EnvironmentRegistry()
        self._instances = InstanceRegistry(
            self._environments,
            self._pool,
            InstanceLimits(
                max_instances=config.max_instances,
                max_project_instances=config.max_project_instances,
                max_starting=config.max_starting_instances,
                max_project_starting=config.max_project_starting_instances,
                client_grace_s=config.client_grace_s,
                ttl_s=config.instance_ttl_s,
            ),
            tag=worker_tag(f"workers/{config.worker_name}"),
        )
        servicer = EnvironmentServicer(
            self._environments, self._instances, max_stream_steps=config.max_stream_steps
        )
        self._server.add(environment_pb2_grpc.add_EnvironmentServiceServicer_to_server, servicer)
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def workers(self) -> WorkerPool:
        """The worker processes."""
        return self._pool

    async def _open(self) -> None:
        """Start the workers, and learn what they offer.

        Raises:
            ConfigError: If an environment cannot be imported.
            EnvironmentFailedError: If the workers do not come up.
        """
        await self._pool.start()
        for spec in await load_specs(self._config, self._pool):
            self._environments.add(spec)
        self._sweeper = asyncio.create_task(self._sweep())

    async def _close(self) -> None:
        """End the workers; live episodes are lost."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self._instances.stop()
        await self._pool.stop()

    async def _sweep(self) -> None:
        config = self._config
        interval_s = min(
            config.instance_ttl_s / 4, config.client_grace_s / 4, _MAX_SWEEP_INTERVAL_S
        )
        while True:
            await asyncio.sleep(interval_s)
            try:
                num_expired = self._instances.expire()
            except Exception:
                logger.exception("the sweep of instances failed by a bug")
                continue
            if num_expired:
                logger.info("instances expired", extra={"num_instances": num_expired})
