"""The engine that lives in this process: Tinsmith's own decoder.

It lives on the engines' thread and steps there between other jobs. A step that fails ends all
requests, since the state of none can be trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tinsmith.version import __version__
from tinsmith_engine import AdapterConfig, SampledSequence, Sampler, SampleRequest, WeightVersion
from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.base.types import ModelInfo
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import (
    DrainingError,
    InternalError,
    VersionNotLoadedError,
    internal_error,
)
from tinsmith_runtime.text.tokenizer_files import read_stop_token_ids
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.engines.engine_protocol import (
    EngineCapabilities,
    EngineListener,
    EngineStatistics,
    HeldWeights,
    SamplingEngine,
    Ticket,
)
from tinsmith_sampler.forms.grammars import Grammars
from tinsmith_sampler.forms.trials import FormTrials
from tinsmith_sampler.metrics import (
    CACHED_PROMPT_TOKENS,
    KV_CACHE_USED_BYTES,
    PREEMPTIONS,
    PROMPT_TOKENS,
    SAMPLED_TOKENS,
    SEQUENCES,
    WEIGHT_UPDATES,
)
from tinsmith_sampler.requests.token_stream import TokenFeed
from tinsmith_sampler.requests.usage_log import SharedTime, amounts_of

logger = logging.getLogger(__name__)

_MAX_LAYOUTS = 4096
"""Configurations whose layout need not be asked for again."""


class EmbeddedEngine:
    """The decoder of one base model.

    Args:
        host: Owns the model and its thread.
        base_model: Name of the model.
        max_sequences: Sequences that decode at once.
        cache_bytes: Memory of their keys and values.
        note_outdated: Is told, on the engine's thread, of a run that has newer weights than a
            request that follows it.
        trials: Tries forms before they are compiled here.
    """

    def __init__(
        self,
        host: EngineHost,
        base_model: str,
        *,
        max_sequences: int,
        cache_bytes: int,
        note_outdated: Callable[[str], None],
        trials: FormTrials,
    ) -> None:
        self._host = host
        self._engine = host.engine(base_model)
        self._sampler = Sampler(self._engine, max_sequences=max_sequences, cache_bytes=cache_bytes)
        self._tickets: dict[int, Ticket] = {}
        self._feeds: dict[int, TokenFeed] = {}
        self._note_outdated = note_outdated
        self._outdated: set[WeightVersion] = set()
        self._stepped_at_s = time.monotonic()
        self._time = SharedTime()
        self._num_preemptions = 0
        KV_CACHE_USED_BYTES.labels(base_model).set_function(lambda: self._sampler.used_cache_bytes)
        directory = host.directories[base_model]
        self._layouts: dict[AdapterConfig, ParameterLayout] = {}
        self._grammars = Grammars(
            trials, directory, self._engine.info.vocab_size, read_stop_token_ids(directory)
        )
        host.thread.add_stepper(self._step, self._fail_all)

    @property
    def info(self) -> ModelInfo:
        """The model."""
        return self._engine.info

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine is; it refuses nothing of the contract."""
        return EngineCapabilities(
            "embedded",
            __version__,
            self._sampler.max_sequence_tokens,
            self._sampler.cache_bytes,
        )

    def refuse(self, request: SampleRequest) -> None:
        """Refuse nothing: this engine does all that the contract names."""

    async def submit(self, ticket: Ticket) -> None:
        """Take a request.

        Raises:
            VersionNotLoadedError: If the weights were replaced before the request began.
            InvalidFieldError: If its output format cannot be followed.
        """
        form = ticket.request.output_format
        if form is not None:
            project = ticket.request.cache_scope
            grammar = await self._grammars.get(form, project=project)
            ticket.request = dataclasses.replace(ticket.request, constraint=grammar)
        await self._host.call(self._add, ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Give a request up."""
        try:
            # Behind `_add`, which may be running although its caller no longer waits for it.
            self._host.thread.submit(self._cancel, ticket)
        except DrainingError:
            logger.debug("the engine stopped before a request was cancelled")

    async def update(self, ticket: Ticket, weights: WeightVersion) -> None:
        """Sample the tokens to come from newer weights.

        Raises:
            VersionNotLoadedError: If they were replaced by even newer ones.
        """
        await self._host.call(self._update, ticket, weights)

    async def load(
        self, name: str, tensors: Mapping[str, Tensor], config: AdapterConfig, version: int
    ) -> WeightVersion:
        """Make a version from tensors of a checkpoint; see `Engine.load_weights` for the errors."""
        layout = self._layouts.get(config)
        if layout is None:
            layout = await self._host.call(self._engine.weights_layout, config)
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[config] = layout
        staged = await asyncio.to_thread(self._engine.stage_weights, layout, tensors, config)
        return self._engine.add_staged(name, staged, version)

    async def unload(self, name: str) -> None:
        """End the hold of `load`."""
        self._engine.unload_weights(name)

    def full_tensors(self, handle: WeightVersion) -> Mapping[str, Tensor]:
        """Return the tensors of a full-parameter version; empty if it is gone."""
        try:
            return self._engine.weights_of(handle)
        except VersionNotLoadedError:
            return {}

    def held(self) -> list[HeldWeights]:
        """Return the versions in memory, oldest first."""
        versions = self._engine.versions
        found = []
        for one in versions.held():
            # The engine's thread may let go of it meanwhile.
            with contextlib.suppress(VersionNotLoadedError):
                # One holder is the exporter; the others are requests.
                found.append(HeldWeights(one, versions.num_holders(one) - 1))
        return found

    def statistics(self) -> EngineStatistics:
        """Return how the engine does."""
        num_requests = len(self._tickets)
        stalled_s = time.monotonic() - self._stepped_at_s if num_requests else 0.0
        return EngineStatistics(num_requests, stalled_s=stalled_s)

    # On the engine's thread from here on.

    def _add(self, ticket: Ticket) -> None:
        ticket.request_id = self._sampler.add(ticket.request, ticket.feed)
        self._tickets[ticket.request_id] = ticket
        ticket.mark_s = self._time.enter(ticket.request.num_samples)
        if ticket.feed is not None:
            self._feeds[ticket.request_id] = ticket.feed
        PROMPT_TOKENS.inc(len(ticket.request.prompt_tokens))

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.request_id is None:
            return
        if self._tickets.pop(ticket.request_id, None) is not None:
            self._charge(ticket, self._sampler.progress(ticket.request_id))
        self._sampler.cancel(ticket.request_id)
        self._feeds.pop(ticket.request_id, None)

    def _charge(self, ticket: Ticket, unfinished: Sequence[SampledSequence] = ()) -> None:
        engine_s = self._time.leave(ticket.request.num_samples, ticket.mark_s)
        sequences = [*ticket.finished, *unfinished]
        ticket.charge(
            amounts_of(
                ticket.request,
                num_sampled_tokens=sum(len(each.tokens) for each in sequences),
                num_cached_tokens=max(
                    (each.num_cached_prompt_tokens for each in sequences), default=0
                ),
                is_read=bool(sequences),
                engine_s=engine_s,
            )
        )

    def _update(self, ticket: Ticket, weights: WeightVersion) -> None:
        if ticket.request_id is not None and self._sampler.update(ticket.request_id, weights):
            WEIGHT_UPDATES.inc()

    def _step(self) -> bool:
        begin_s = time.perf_counter()
        finished = self._sampler.step()
        self._time.spend(time.perf_counter() - begin_s)
        self._stepped_at_s = time.monotonic()
        PREEMPTIONS.inc(self._sampler.num_preemptions - self._num_preemptions)
        self._num_preemptions = self._sampler.num_preemptions
        for feed in self._feeds.values():
            feed.flush()
        for sequence in finished:
            SAMPLED_TOKENS.inc(len(sequence.tokens))
            SEQUENCES.labels(sequence.finish_reason).inc()
            ticket = self._tickets[sequence.request_id]
            ticket.finished.append(sequence)
            if len(ticket.finished) == ticket.request.num_samples:
                del self._tickets[sequence.request_id]
                self._feeds.pop(sequence.request_id, None)
                CACHED_PROMPT_TOKENS.inc(sequence.num_cached_prompt_tokens)
                self._charge(ticket)
                if ticket.future.set_running_or_notify_cancel():
                    ticket.future.set_result(ticket.finished)
        self._announce()
        return self._sampler.has_work

    def _announce(self) -> None:
        """Tell of each version once that its run has newer weights."""
        outdated = self._sampler.outdated()
        for handle in outdated - self._outdated:
            self._note_outdated(handle.run)
        self._outdated = outdated

    def _fail_all(self, error: Exception) -> None:
        """End everything that decodes: a step failed, and its state cannot be trusted."""
        reported: InternalError = internal_error()
        logger.error(
            "decoding failed",
            extra={"num_requests": len(self._tickets), "problem": type(error).__name__},
        )
        for request_id, ticket in list(self._tickets.items()):
            self._charge(ticket)
            self._sampler.cancel(request_id)
            if ticket.feed is not None:
                ticket.feed.fail(reported)
            if ticket.future.set_running_or_notify_cancel():
                ticket.future.set_exception(reported)
        self._tickets.clear()
        self._feeds.clear()
        self._sampler.forget_prompts()


@dataclass(frozen=True, slots=True)
class EmbeddedEngines:
    """The engines of a host, for a sampler pod.

    Attributes:
        host: Base models; those of the trainer where both share a process.
    """

    host: EngineHost

    @property
    def infos(self) -> Mapping[str, ModelInfo]:
        """The base models by name."""
        return {name: engine.info for name, engine in self.host.engines.items()}

    @property
    def directories(self) -> Mapping[str, Path]:
        """Where the files of each are."""
        return self.host.directories

    def engines(
        self, config: SamplerConfig, listener: EngineListener, trials: FormTrials
    ) -> Mapping[str, SamplingEngine]:
        """Return an engine for each base model."""
        return {
            name: EmbeddedEngine(
                self.host,
                name,
                max_sequences=config.max_concurrent_sequences,
                cache_bytes=config.cache_bytes,
                note_outdated=listener.note_outdated,
                trials=trials,
            )
            for name in self.host.engines
        }
