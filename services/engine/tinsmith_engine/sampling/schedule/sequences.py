"""What a sampler keeps of a request, and of each sequence that it samples."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tinsmith_engine.base.types import WeightVersion
from tinsmith_engine.sampling.cache.prefix_cache import PromptKey
from tinsmith_engine.sampling.decode.logit_shaping import RowShaping
from tinsmith_engine.sampling.decode.prompt_logprobs import PromptScores
from tinsmith_engine.sampling.decode.token_selection import PickRule, uniform
from tinsmith_engine.sampling.request.output_constraint import RowConstraint
from tinsmith_engine.sampling.request.sample_request import (
    PromptLogprobs,
    SampledSequence,
    SampleRequest,
    TokenListener,
)
from tinsmith_engine.sampling.request.stop_search import StopSearch

_PATIENCE = 32
"""Groups that begin while another one waits for blocks, at most."""


@dataclass(slots=True, eq=False)
class RequestState:
    """A request that has not ended, and how far it is."""

    id: int
    request: SampleRequest
    weights: WeightVersion | None
    """What its next token is sampled from."""
    listener: TokenListener | None
    num_unfinished: int
    is_read: bool = False
    """Whether its prompt was read, and so its scores are known."""
    prompt: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    key: PromptKey | None = None
    """Of its prompt under its weights; None where the prompt cannot be known again."""
    has_changed: bool = False
    """Whether its weights changed: what its sequences have cached is of several versions."""

    def __post_init__(self) -> None:
        self.use(self.weights)

    @property
    def project(self) -> str:
        """Whose request it is."""
        return self.request.cache_scope

    @property
    def version(self) -> int:
        """Of its weights; 0 for a base model."""
        return 0 if self.weights is None else self.weights.version

    def update(self, weights: WeightVersion) -> None:
        """Sample from other weights from now on."""
        self.has_changed = True
        self.use(weights)

    def use(self, weights: WeightVersion | None) -> None:
        """Sample from these weights."""
        self.weights = weights
        # Images are part of what was read, and not among the tokens.
        if not self.request.images:
            request = self.request
            self.key = PromptKey(request.cache_scope, weights, tuple(request.prompt_tokens))


class HeldLogits(NamedTuple):
    """What the next token of a sequence is drawn from once its mask is computed."""

    logits_V: Tensor
    version: int
    """Of the weights that they are of."""


@dataclass(slots=True, eq=False)
class ActiveSequence:
    """One sequence that is being sampled."""

    state: RequestState
    sample_index: int
    serial: int
    """Of its first beginning: an earlier one has a lower number."""
    tokens: list[int]
    """Prompt and completion."""
    rope_shift: int
    """What the rotary position of the completion is ahead of the number of tokens."""
    stop_search: StopSearch | None
    shaping: RowShaping | None = None
    """What is done to its logits; None for nothing."""
    constraint: RowConstraint | None = None
    """Which tokens it may go on with; None for all."""
    held: HeldLogits | None = None
    """Of a sequence that waits for its mask; it reads nothing meanwhile."""
    blocks: list[int] = field(default_factory=list)
    """Where it is cached."""
    planned: list[int] = field(default_factory=list)
    """Blocks to grow into, as long as they are free."""
    num_cached: int = 0
    """Tokens whose keys and values are in the blocks."""
    is_kept: bool = False
    """Whether it waited so long that it does not give way to younger ones again."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    topk: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def completion(self) -> list[int]:
        """The tokens that were sampled."""
        return self.tokens[len(self.state.request.prompt_tokens) :]

    @property
    def is_caught_up(self) -> bool:
        """Whether all tokens but the newest are cached: the next logits are those of a new one."""
        return self.num_cached == len(self.tokens) - 1

    def rule(self) -> PickRule:
        """Return how its next token is picked."""
        request = self.state.request
        drawn = uniform(request.seed, self.sample_index, len(self.logprobs))
        return PickRule(request.temperature, request.top_k, request.top_p, drawn, request.min_p)

    def sampled(self, reason: str | None) -> SampledSequence:
        """Return it as the caller sees it."""
        state = self.state
        return SampledSequence(
            request_id=state.id,
            sample_index=self.sample_index,
            tokens=self.completion,
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            versions=list(self.versions),
            finish_reason=reason,
            prompt=state.prompt,
            topk=list(self.topk) if state.request.topk_sample_logprobs > 0 else None,
            num_cached_prompt_tokens=state.num_cached_tokens,
        )


@dataclass(slots=True, eq=False)
class WaitingGroup:
    """Samples of one request that have not begun, or one that gave its blocks up."""

    state: RequestState
    samples: range
    resumed: ActiveSequence | None = None
    num_passed: int = 0
    """Groups that began while this one waited for blocks."""

    @property
    def is_urgent(self) -> bool:
        """Whether others passed it too often: then nothing else begins before it."""
        return self.num_passed >= _PATIENCE


@dataclass(slots=True, eq=False)
class Reading:
    """The prompt of a group, while it is read piece by piece."""

    group: WaitingGroup
    """The samples that begin once it is read."""
    weights: WeightVersion | None
    """Those of its first piece. A piece behind an update of the request is read with newer ones."""
    blocks: list[int]
    """All that the prompt takes; its reader is this."""
    planned: list[int]
    """Blocks for the first sequence to grow into."""
    num_read: int
    """Tokens that are in the blocks."""
    num_known: int
    """How many of them did not have to be read."""
    scores: PromptScores | None
    """What the request wants to know of its prompt, if it does."""
    is_pure: bool = True
    """Whether all of it was read with the same weights."""
    was_served: bool = False
    """Whether the last step read a piece of it."""
    last_logits: Tensor | None = None
    """After the last token, [1, V]; None until it is read."""

    @property
    def state(self) -> RequestState:
        """The request."""
        return self.group.state

    @property
    def num_left(self) -> int:
        """Tokens that are still to be read."""
        return len(self.state.request.prompt_tokens) - self.num_read


class WaitingGroups:
    """Groups by project, in the order of their arrival."""

    def __init__(self) -> None:
        self._groups: dict[str, deque[WaitingGroup]] = {}
        self._num_samples: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[WaitingGroup]:
        for groups in self._groups.values():
            yield from groups

    @property
    def projects(self) -> list[str]:
        """Those that have something waiting."""
        return list(self._groups)

    def of(self, project: str) -> Iterable[WaitingGroup]:
        """Return what a project has waiting, the first to begin first."""
        return self._groups.get(project, ())

    def num_samples(self, project: str) -> int:
        """Return how many samples of a project wait."""
        return self._num_samples[project]

    def add(self, group: WaitingGroup, *, is_first: bool = False) -> None:
        """Add a group behind those of its project, or before them."""
        groups = self._groups.setdefault(group.state.project, deque())
        if is_first:
            groups.appendleft(group)
        else:
            groups.append(group)
        self._num_samples[group.state.project] += len(group.samples)

    def remove(self, group: WaitingGroup) -> None:
        """Take a group out."""
        groups = self._groups[group.state.project]
        groups.remove(group)
        self._num_samples[group.state.project] -= len(group.samples)
        if not groups:
            del self._groups[group.state.project], self._num_samples[group.state.project]

    def remove_state(self, state: RequestState) -> None:
        """Take out what a request has waiting."""
        for group in [group for group in self.of(state.project) if group.state is state]:
            self.remove(group)
