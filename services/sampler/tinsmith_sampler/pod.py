"""Wires a sampler: engines, weights, server, registration."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from tinsmith.v1 import sampler_pb2_grpc, scheduler_pb2
from tinsmith_engine.contract.model_catalog import ModelCatalog
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import storage
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.scheduler_client import SchedulerClient, WorkerRegistration
from tinsmith_runtime.rpc.server import PodServer
from tinsmith_runtime.tokenizer_files import require_tokenizers
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.rpc import codec
from tinsmith_sampler.rpc.servicer import SamplerServicer
from tinsmith_sampler.rpc.trainer_client import TrainerClient
from tinsmith_sampler.service import DecodeText, SamplingService
from tinsmith_sampler.sessions import SessionCache, Target
from tinsmith_sampler.weights import PublishLive, WeightSource


def load_engines(config: SamplerConfig) -> EngineHost:
    """Load the base models of a sampler in a process of its own.

    Raises:
        ModelNotFoundError: If one is neither a directory nor a model of the hub, or has no
            tokenizer.
    """
    models = config.models()
    require_tokenizers(models)
    host = EngineHost.load(
        models,
        dtype=config.dtype,
        device=config.device,
        num_threads=config.num_threads or None,
        exact=config.exact,
        compiled=config.compiled,
        max_resident_runs=1,
    )
    # Those of the hub are here now.
    require_tokenizers(host.directories)
    return host


class SamplerPod:
    """A sampler, from its settings to its server.

    Args:
        config: Settings.
        host: Base models; those of the trainer where both share a process.
        publish_live: Copies the newest weights of a run of this process; None across processes.
    """

    def __init__(
        self,
        config: SamplerConfig,
        host: EngineHost,
        *,
        publish_live: PublishLive | None = None,
    ) -> None:
        if not config.scheduler_address or not config.pod_key:
            raise ConfigError("a sampler needs scheduler_address and pod_key")
        self._config = config
        self._catalog = ModelCatalog.of(host)
        self._scheduler = SchedulerClient(config.scheduler_address, pod_key=config.pod_key)
        self._trainers = TrainerClient(pod_key=config.pod_key)
        self._store = storage.open(config.storage_uri)
        weights = WeightSource(
            host,
            self._store,
            self._trainers,
            max_loaded=config.max_loaded_weights,
            publish_live=publish_live,
        )
        service = SamplingService(
            config,
            host,
            SessionCache(self._look_up, ttl_s=config.session_ttl_s),
            weights,
            _text_decoders(host),
            {name: list(model.stop_token_ids) for name, model in self._catalog.models.items()},
        )
        self._server = PodServer(
            config.server(), domain=codec.DOMAIN, authenticator=self._scheduler.authenticator()
        )
        self._server.add(
            sampler_pb2_grpc.add_SamplerServiceServicer_to_server,
            SamplerServicer(config, service, self._catalog),
        )
        self._registration: WorkerRegistration | None = None

    @property
    def address(self) -> str:
        """`host:port` of the server."""
        return self._server.address

    @property
    def metrics_address(self) -> str:
        """`host:port` of the Prometheus endpoint."""
        return self._server.metrics_address

    async def start(self) -> None:
        """Serve and register.

        Raises:
            ConfigError: If the object store cannot be used.
        """
        await asyncio.to_thread(storage.probe_at_start, self._store, writable=False)
        await self._server.start()
        worker = scheduler_pb2.Worker(
            name=f"workers/{self._config.worker_name}",
            role=scheduler_pb2.Worker.ROLE_SAMPLER,
            address=self._server.address,
            models=self._catalog.select(""),
            pool=self._config.pool,
            project=self._config.dedicated_project,
            checkpoint=self._config.dedicated_checkpoint,
        )
        self._registration = WorkerRegistration(self._scheduler, worker, self._catalog.tokenizers)
        self._registration.start()

    async def wait_listed(self, timeout_s: float) -> None:
        """Return once the scheduler lists this pod; see `WorkerRegistration.wait_listed`."""
        if self._registration is not None:
            await self._registration.wait_listed(timeout_s)

    async def stop(self) -> None:
        """Finish running calls, then close."""
        if self._registration is not None:
            await self._registration.stop()
        await self._server.stop()
        await self._trainers.close()
        await self._scheduler.close()

    async def _look_up(self, name: str) -> Target:
        return codec.decode_target(await self._scheduler.get_sampling_session(name))


def _text_decoders(host: EngineHost) -> dict[str, DecodeText]:
    """Return what turns tokens into text, for the models that have a fast tokenizer."""
    return {
        name: _text_decoder(directory)
        for name, directory in host.directories.items()
        if (directory / "tokenizer.json").is_file()
    }


def _text_decoder(directory: Path) -> DecodeText:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    return decode
