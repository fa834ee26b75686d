"""What a sampler pod needs of an engine, whichever it is.

An engine serves one base model: it takes requests, gives tokens to feeds and holds versions of
weights. What is the same for all engines is not here: limits, metrics and sessions are of the pod.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from tinsmith.tracing.spans import Span
from tinsmith_engine import AdapterConfig, SampledSequence, SampleRequest, WeightVersion
from tinsmith_engine.base.types import ModelInfo
from tinsmith_runtime.usage import UsageAmounts
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.forms.trials import FormTrials
from tinsmith_sampler.requests.token_stream import TokenFeed


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine is.

    Attributes:
        name: `embedded` or `vllm`.
        version: Of the engine.
        max_sequence_tokens: The longest prompt with its completion that context and cache hold.
        cache_bytes: Memory that keys and values may take; 0 where nothing is cached.
        refused: Names of what the engine refuses, in words of the contract where it has them.
    """

    name: str
    version: str
    max_sequence_tokens: int
    cache_bytes: int
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """A version in memory, and how many requests sample from it."""

    handle: WeightVersion
    num_requests: int


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """How an engine does.

    Attributes:
        num_requests: Requests that it holds.
        num_restarts: Times that it was started again after a failure.
        stalled_s: Seconds since it last got on with the work that it has; 0 without work.
    """

    num_requests: int
    num_restarts: int = 0
    stalled_s: float = 0.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that was given to an engine, and what of it is finished."""

    request: SampleRequest
    feed: TokenFeed | None
    future: Future[list[SampledSequence]] = field(default_factory=Future)
    request_id: int | None = None
    """Of the engine, which alone reads and writes it."""
    finished: list[SampledSequence] = field(default_factory=list)
    """In the order of their ends."""
    is_closed: bool = False
    mark_s: float = 0.0
    """Of the engine, which shares its time out; see `SharedTime`."""
    charge: Callable[[UsageAmounts], None] = lambda _: None
    """Is told once, on any thread, what the request used."""
    span: Span | None = None
    """Of its trace; None without one."""
    begin_s: float = 0.0
    """When the span began, in seconds since the epoch."""


class SamplingEngine(Protocol):
    """The engine of one base model."""

    @property
    def info(self) -> ModelInfo:
        """The model."""
        ...

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine is, and what it refuses."""
        ...

    def refuse(self, request: SampleRequest) -> None:
        """Refuse what the engine cannot do, before anything is spent on it.

        Raises:
            InvalidFieldError: Names the field, and the engine that cannot do what it asks for.
        """
        ...

    async def submit(self, ticket: Ticket) -> None:
        """Take a request; its feed gets tokens, and its future all completions.

        Raises:
            VersionNotLoadedError: If its weights were replaced before it began.
        """
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Give a request up, also one that `submit` is still taking."""
        ...

    async def update(self, ticket: Ticket, weights: WeightVersion) -> None:
        """Sample the tokens to come from newer weights.

        Raises:
            VersionNotLoadedError: If they were replaced by even newer ones.
        """
        ...

    async def load(
        self, name: str, tensors: Mapping[str, Tensor], config: AdapterConfig, version: int
    ) -> WeightVersion:
        """Make a version from tensors of a checkpoint; it is held until `unload`.

        The tensors are staged beside decoding; the switch to them takes no time that depends on
        their size.

        Raises:
            CheckpointIncompatibleError: If the tensors are not those of such a run.
        """
        ...

    async def unload(self, name: str) -> None:
        """End the hold of `load`; requests may still hold the version."""
        ...

    def full_tensors(self, handle: WeightVersion) -> Mapping[str, Tensor]:
        """Return the tensors of a full-parameter version by name; empty if they cannot be had.

        May be called on any thread. The tensors are not to be written to.
        """
        ...

    def held(self) -> list[HeldWeights]:
        """Return the versions in memory, oldest first."""
        ...

    def statistics(self) -> EngineStatistics:
        """Return how the engine does."""
        ...


@dataclass(frozen=True, slots=True)
class EngineListener:
    """What a pod wants to know of its engines.

    Attributes:
        note_outdated: Is told, on any thread, of a run that has newer weights than a request that
            follows it.
        note_failed: Is told, on the event loop, that an engine ended and cannot be started again.
    """

    note_outdated: Callable[[str], None]
    note_failed: Callable[[], None]


class EngineSource(Protocol):
    """Where a pod has its engines from."""

    @property
    def infos(self) -> Mapping[str, ModelInfo]:
        """The base models by name."""
        ...

    @property
    def directories(self) -> Mapping[str, Path]:
        """Where the files of each are."""
        ...

    def engines(
        self, config: SamplerConfig, listener: EngineListener, trials: FormTrials
    ) -> Mapping[str, SamplingEngine]:
        """Return an engine for each base model; called once.

        Args:
            config: Settings of the pod.
            listener: Is told of the engines.
            trials: Tries forms before an engine of this process compiles them.
        """
        ...
