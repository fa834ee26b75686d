"""Wires a sampler: engines, weights, server, registration."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from pathlib import Path

from tinsmith.text.tokenizer import Tokenizer
from tinsmith.v1 import sampler_pb2_grpc, scheduler_pb2, workers_pb2
from tinsmith_engine.contract.model_catalog import ModelCatalog
from tinsmith_engine.sampling.request.sample_request import DecodeText
from tinsmith_runtime import storage
from tinsmith_runtime.pod.base import WorkerPod
from tinsmith_runtime.rpc.usage_reporter import UsageReporter
from tinsmith_runtime.usage import BudgetGate
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.engines.engine_protocol import EngineListener, EngineSource
from tinsmith_sampler.forms.trials import FormTrials
from tinsmith_sampler.requests.sessions import SessionCache, Target
from tinsmith_sampler.requests.usage_log import SampledUsage
from tinsmith_sampler.rpc import codec
from tinsmith_sampler.rpc.servicer import SamplerServicer
from tinsmith_sampler.rpc.trainer_client import TrainerClient
from tinsmith_sampler.service import SamplingService
from tinsmith_sampler.weights.live_weights import WeightFollower
from tinsmith_sampler.weights.weight_source import ExportLive, WeightSource


class SamplerPod(WorkerPod):
    """A sampler, from its settings to its server.

    Args:
        config: Settings.
        source: Engines of the base models.
        export_live: Copies the newest weights of a run of this process; None across processes.
    """

    def __init__(
        self,
        config: SamplerConfig,
        source: EngineSource,
        *,
        export_live: ExportLive | None = None,
    ) -> None:
        self._config = config
        self._farewell: asyncio.Task[None] | None = None
        self._catalog = ModelCatalog.describing(source.infos, source.directories)
        super().__init__(
            config,
            workers_pb2.Worker.ROLE_SAMPLER,
            domain=codec.DOMAIN,
            tokenizers=self._catalog.tokenizers,
        )
        self._trainers = TrainerClient(self._credentials)
        self._store = storage.open(config.storage_uri)
        listener = EngineListener(lambda run: follower.note_outdated(run), self._note_failed)
        self._trials = FormTrials()
        engines = source.engines(config, listener, self._trials)
        weights = WeightSource(
            engines,
            self._store,
            self._trainers,
            max_loaded=config.max_loaded_weights,
            export_live=export_live,
        )
        follower = WeightFollower(
            lambda target: weights.get(target, min_version=0),
            poll_interval_s=config.weight_poll_interval_s,
            is_told=weights.is_local,
        )
        usage = SampledUsage(BudgetGate())
        self._usage_reporter = UsageReporter(usage, usage.budgets, self._scheduler)
        self._service = SamplingService(
            config,
            engines,
            SessionCache(self._look_up, ttl_s=config.session_ttl_s),
            weights,
            follower,
            _text_decoders(source.directories),
            {name: list(model.stop_token_ids) for name, model in self._catalog.models.items()},
            usage,
        )
        self._server.add(
            sampler_pb2_grpc.add_SamplerServiceServicer_to_server,
            SamplerServicer(config, self._service, self._catalog, name=self._listing.name),
        )

    def _note_failed(self) -> None:
        """Report unhealthy, so that the pod is replaced."""
        self._farewell = asyncio.create_task(self._server.report_unhealthy())

    async def stop(self) -> None:
        """Leave the listing, so that no new request comes, and do as other pods."""
        if self._registration is not None:
            await self._registration.stop()
            await self._registration.leave()
            self._registration = None
        await super().stop()

    async def _open(self) -> None:
        await asyncio.to_thread(storage.probe_at_start, self._store, writable=False)
        self._usage_reporter.start()

    async def _close(self) -> None:
        await self._usage_reporter.stop()
        await self._trainers.close()
        await asyncio.to_thread(self._trials.close)

    def _describe(self) -> workers_pb2.Worker:
        return workers_pb2.Worker(
            models=self._catalog.select(""),
            incarnation=uuid.uuid4().hex,
            project=self._config.dedicated_project,
            checkpoint=self._config.dedicated_checkpoint,
        )

    def _load(self) -> scheduler_pb2.SamplerLoad:
        return codec.encode_load(self._service.load)

    async def _look_up(self, name: str) -> Target:
        return codec.decode_target(await self._scheduler.get_sampling_session(name))


def _text_decoders(directories: Mapping[str, Path]) -> dict[str, DecodeText]:
    """Return what turns tokens into text, for the models that have a fast tokenizer."""
    return {
        name: _text_decoder(directory)
        for name, directory in directories.items()
        if (directory / "tokenizer.json").is_file()
    }


def _text_decoder(directory: Path) -> DecodeText:
    return Tokenizer({"tokenizer.json": (directory / "tokenizer.json").read_bytes()}).decode_behind
