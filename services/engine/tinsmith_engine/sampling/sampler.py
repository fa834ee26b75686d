"""The embedded sampler: continuous batching over immutable weight versions.

`step` reads pieces of the prompts of waiting requests in one pass, then makes one token for active
sequences. A prompt is read once for all of its samples. What is known of it is not read again
(`prefix_cache.py`): a turn of a conversation reads only what is new. Sequences come
and go without touching their neighbours: shapes, random numbers and attention of a row depend on
the row alone. A request gives the same bits in a full batch as by itself.

Projects share rows, prompts and blocks (`step_plan.py`). A sequence that finds no free block makes
the youngest one of a project above its part give way. That one loses its blocks, and later reads
its prompt and its own tokens again, each as it did before: with the same bits. A sequence whose
mask is not computed yet keeps its logits, and joins a later step.

A request holds the version that it samples from. One that follows its run may be given a newer
version between two steps: the keys and values of its earlier tokens stay, unless it has to give
way, and each token carries the version that produced it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.base.types import WeightVersion
from tinsmith_engine.loading.hf_fallback import FallbackModel
from tinsmith_engine.model.decoder import Decoder
from tinsmith_engine.sampling.cache.block_pool import BLOCK_TOKENS, blocks_for
from tinsmith_engine.sampling.cache.kv_cache import block_bytes
from tinsmith_engine.sampling.cache.prefix_cache import MAX_PROMPTS
from tinsmith_engine.sampling.decode.decode_step import (
    CachedDecoding,
    DecodeSequence,
    Decoding,
    RecomputeDecoding,
)
from tinsmith_engine.sampling.decode.logit_shaping import RowShaping
from tinsmith_engine.sampling.request.output_constraint import MASK_WAIT_S, are_masked
from tinsmith_engine.sampling.request.sample_request import (
    SampledSequence,
    SampledToken,
    SampleRequest,
    TokenListener,
    place_prompt,
    validate_sample_request,
)
from tinsmith_engine.sampling.request.stop_search import StopSearch
from tinsmith_engine.sampling.schedule.admission import Candidate, SequenceAdmission
from tinsmith_engine.sampling.schedule.sequence_cache import ReadPrompt, SequenceCache
from tinsmith_engine.sampling.schedule.sequences import (
    ActiveSequence,
    HeldLogits,
    Reading,
    RequestState,
    WaitingGroup,
)
from tinsmith_engine.sampling.schedule.step_plan import ProjectWork, StepPlanner
from tinsmith_engine.sampling.token_drawing import draw_tokens
from tinsmith_engine.training.engine import Engine
from tinsmith_runtime.errors import ConfigError, SequenceTooLongError

_SEQUENCES_WITHOUT_CACHE = 16


class _Part(NamedTuple):
    """What a step may do for a project's prompts."""

    num_tokens: int
    """Of the piece that is read; 0 where a prompt is known."""
    what: Reading | Candidate


class Sampler:
    """Samples from an engine's base model and exported versions.

    Args:
        engine: Holds the model and the versions. Called by the same single thread.
        max_sequences: How many sequences get a token at a time.
        max_prefill_tokens: Prompt tokens read in one step while no sequence is being sampled;
            beside sequences, as many as take the time of their tokens.
        cache_bytes: Memory of keys and values; it is never passed. On a GPU it is taken at once.
        clock: Seconds by which the costs of a step are learnt. By default those of the thread on a
            CPU, where other processes say nothing about a step, and of the wall elsewhere.

    Raises:
        ConfigError: The cache does not hold as much as one block.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_sequences: int = 64,
        max_prefill_tokens: int = 4096,
        cache_bytes: int = 2**31,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._info, self._versions = engine.info, engine.versions
        self._is_outdated = engine.is_outdated
        if isinstance(engine.model, FallbackModel):
            # Each of them is computed by itself, from its beginning.
            max_sequences = min(max_sequences, _SEQUENCES_WITHOUT_CACHE)
        self._max_sequences = max_sequences
        is_cpu = engine.device.type == "cpu"
        self._mask_wait_s = MASK_WAIT_S
        self._clock = clock or (time.thread_time if is_cpu else time.perf_counter)
        self._decoding = _decoding(engine, max_sequences, cache_bytes)
        self._cache = SequenceCache(self._decoding)
        self._admission = SequenceAdmission(self._cache, max_sequences)
        self._planner = StepPlanner(max_prefill_tokens)
        self._states: dict[int, RequestState] = {}
        self._following: dict[int, RequestState] = {}
        self._num_requests = 0
        self._num_begun = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._admission.has_work

    @property
    def num_active(self) -> int:
        """How many sequences, and prompts that are being read, hold blocks."""
        return len(self._admission.active) + len(self._admission.reading)

    @property
    def cache_bytes(self) -> int:
        """Memory that keys and values may take; 0 where nothing is cached."""
        return self._decoding.cache_bytes

    @property
    def used_cache_bytes(self) -> int:
        """Memory of keys and values that sequences hold; may be asked by any thread."""
        num_blocks = self._cache.num_blocks
        if not num_blocks:
            return 0
        num_used = num_blocks - self._cache.num_available
        return self._decoding.cache_bytes * num_used // num_blocks

    @property
    def num_preemptions(self) -> int:
        """How many sequences gave their blocks up to others so far."""
        return self._admission.num_preemptions

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt with its completion that the context and the cache hold."""
        if not self._cache.num_blocks:
            return self._info.max_context_tokens
        # The last token of a completion is not cached.
        room = self._cache.num_blocks * BLOCK_TOKENS + 1
        return min(self._info.max_context_tokens, room)

    def add(self, request: SampleRequest, listener: TokenListener | None = None) -> int:
        """Queue a request and return its id; the request holds its version until it ends.

        Args:
            request: What is asked for.
            listener: Is told of each token as it is made.

        Raises:
            InvalidArgumentError: See `validate_sample_request`.
            SequenceTooLongError: The prompt exceeds the context of the model, or prompt and
                completion what the cache can ever hold.
            VersionNotLoadedError: The request's version has no holder any more.
        """
        request = place_prompt(request, self._info, "prompt_tokens")
        validate_sample_request(request, self._info)
        self._check_fits(request)
        if request.weights is not None:
            self._versions.acquire(request.weights)
        self._num_requests += 1
        state = RequestState(
            self._num_requests, request, request.weights, listener, request.num_samples
        )
        self._states[state.id] = state
        if request.follows_run and request.weights is not None:
            self._following[state.id] = state
        self._admission.waiting.add(WaitingGroup(state, range(request.num_samples)))
        return state.id

    def _check_fits(self, request: SampleRequest) -> None:
        num_tokens = len(request.prompt_tokens)
        longest = num_tokens + max(self._limit(request), 0)
        if longest > self.max_sequence_tokens:
            raise SequenceTooLongError(
                f"the prompt of {num_tokens} tokens and a completion of up to "
                f"{longest - num_tokens} exceed the {self.max_sequence_tokens} tokens that the "
                "cache of this sampler can hold; send a shorter prompt or lower max_tokens",
                num_tokens=longest,
                limit=self.max_sequence_tokens,
            )

    def cancel(self, request_id: int) -> None:
        """Forget a request and what it sampled; an unknown or finished id is no error."""
        state = self._states.get(request_id)
        if state is None:
            return
        self._admission.cancel(state)
        self._forget(state)

    def update(self, request_id: int, weights: WeightVersion) -> bool:
        """Sample the tokens to come of a request from other weights of its run.

        Prompts of samples that did not begin yet are read with the new weights; of a prompt that
        is being read, what is left.

        Returns:
            Whether anything changed: not for an unknown or finished id, a request that does not
            follow its run, or the weights that it has.

        Raises:
            VersionNotLoadedError: The version has no holder any more; the request keeps its own.
        """
        state = self._following.get(request_id)
        if state is None or state.weights is None or state.weights == weights:
            return False
        self._versions.acquire(weights)
        previous = state.weights
        state.update(weights)
        self._versions.release(previous)
        return True

    def outdated(self) -> set[WeightVersion]:
        """Return the versions of requests that follow a run which has newer weights by now."""
        followed = {state.weights for state in self._following.values()}
        return {one for one in followed if one is not None and self._is_outdated(one)}

    def progress(self, request_id: int) -> list[SampledSequence]:
        """Return the sequences of a request that are still growing, as far as they are."""
        growing = self._admission.growing()
        return [one.sampled(None) for one in growing if one.state.id == request_id]

    def forget_prompts(self) -> None:
        """Read every prompt anew, as after a failure that may have left damage."""
        self._admission.abandon(list(self._admission.reading))
        self._cache.distrust_all()

    def step(self) -> list[SampledSequence]:
        """Read what fits, make a token for active sequences, return what finished."""
        drawn = self._draw_held(0.0)
        self._mask_wait_s = MASK_WAIT_S
        started = self._clock()
        num_rows = Counter(one.state.project for one in self._admission.active if one.held is None)
        longest_piece = self._planner.budget.of_piece(num_rows.total())
        parts = self._parts(longest_piece)
        plan = self._planner.plan(
            {
                project: ProjectWork(
                    num_rows[project], [one.num_tokens for one in parts.get(project, ())]
                )
                for project in {**num_rows, **parts}
            }
        )
        finished, read = self._read(parts, plan.num_prompts, longest_piece)
        read_by = self._clock()
        rows = self._admission.extended(self._chosen(plan.num_rows))
        if rows:
            finished += self._decode(rows)
        ended = self._clock()
        if num_rows and rows and read:
            self._planner.budget.note(
                sum(read),
                read_by - started,
                ended - read_by,
                num_prompts=sum(len(one) for one in parts.values()),
                num_rows=len(rows),
            )
        # A full step says little of small ones: many rows are cheaper, each, than few.
        if plan.num_rows is not None and (rows or read):
            self._planner.costs.note(len(rows), read, ended - started)
        if not rows and not read:
            # There is nothing to do but for sequences whose masks are not computed.
            finished += self._draw_held(MASK_WAIT_S)
        return drawn + finished

    def _parts(self, most: int) -> dict[str, list[_Part]]:
        """Return the pieces of prompts that could be read, and what could begin, by project.

        A prompt that the last step read a piece of comes after those that wait to begin: a long one
        does not hold up what is behind it, and is not held up by it.
        """
        found: dict[str, list[_Part]] = {}
        last: dict[str, list[_Part]] = {}
        for reading in self._admission.reading:
            size = self._cache.size_of_piece(reading, most)
            places = last if reading.was_served else found
            places.setdefault(reading.state.project, []).append(_Part(size, reading))
        for project, candidates in self._admission.candidates().items():
            for one in candidates:
                found.setdefault(project, []).append(_Part(min(one.num_tokens, most), one))
        for project, parts in last.items():
            found.setdefault(project, []).extend(parts)
        return found

    def _read(
        self, parts: Mapping[str, Sequence[_Part]], num_parts: Mapping[str, int], most: int
    ) -> tuple[list[SampledSequence], list[int]]:
        """Read pieces of prompts, and begin what is read; return what finished and the tokens."""
        finished: list[SampledSequence] = []
        pieces: list[tuple[Reading, int]] = []
        behind: list[Candidate] = []
        for project, count in num_parts.items():
            for part in parts.get(project, ())[:count]:
                if isinstance(part.what, Reading):
                    pieces.append((part.what, part.num_tokens))
                elif self._admission.is_being_read(part.what.group.state):
                    behind.append(part.what)
                elif not self._admission.can_begin(part.what):
                    self._planner.give_back(project, part.num_tokens)
                elif self._cache.is_known(part.what.group.state):
                    finished += self._begin_known(part.what)
                else:
                    reading = self._admission.begin_reading(part.what)
                    timeline = reading.state.request.timeline
                    if timeline is not None:
                        timeline.note_begin()
                    pieces.append((reading, self._cache.size_of_piece(reading, most)))
        read = [num_tokens for _, num_tokens in pieces]
        finished += self._read_pieces(pieces)
        for candidate in behind:
            # Another request had the same prompt.
            if self._cache.is_known(candidate.group.state) and self._admission.can_begin(candidate):
                finished += self._begin_known(candidate)
            else:
                self._planner.give_back(candidate.group.state.project, candidate.num_tokens)
        return finished, read

    def _read_pieces(self, pieces: Sequence[tuple[Reading, int]]) -> list[SampledSequence]:
        """Read pieces in one pass, and begin what is read; return what finished."""
        if not pieces:
            return []
        try:
            self._cache.read(pieces)
        except BaseException:
            self._admission.abandon([reading for reading, _ in pieces])
            raise
        finished: list[SampledSequence] = []
        served = {id(reading) for reading, _ in pieces}
        for reading in list(self._admission.reading):
            reading.was_served = id(reading) in served
            if not reading.num_left:
                finished += self._begin_read(reading)
        return finished

    def _begin_known(self, candidate: Candidate) -> list[SampledSequence]:
        prompt = self._cache.known(candidate.group.state)
        group = self._admission.begin(candidate)
        return self._begin(group, prompt)

    def _begin_read(self, reading: Reading) -> list[SampledSequence]:
        prompt = self._cache.finish(reading)
        self._admission.reading.remove(reading)
        num_samples = self._cache.num_beginning(reading.group, prompt)
        group = self._admission.put_back(reading.group, num_samples)
        return self._begin(group, prompt)

    def _begin(self, group: WaitingGroup, prompt: ReadPrompt) -> list[SampledSequence]:
        state = group.state
        if state.request.timeline is not None:
            state.request.timeline.note_read()
        begun = (
            [group.resumed]
            if group.resumed
            else [self._sequence(state, sample, prompt.rope_shift) for sample in group.samples]
        )
        self._cache.adopt(begun, prompt)
        for sequence in begun:
            sequence.is_kept |= group.is_urgent
        self._cache.release(prompt.blocks)
        self._admission.enter(begun)
        if group.resumed and group.resumed.completion:
            return []
        last = prompt.last_logits
        if self._limit(state.request) == 0:
            finished = [self._finish(sequence, "length") for sequence in begun]
            if not last.isfinite().all():
                self._cache.distrust(prompt.blocks)
            return finished
        return self._take_tokens(begun, last.expand(len(begun), -1))

    def _sequence(self, state: RequestState, sample: int, rope_shift: int) -> ActiveSequence:
        self._num_begun += 1
        tokens = list(state.request.prompt_tokens)
        search = StopSearch.of(state.request)
        shaping = state.request.shaping
        row = None if shaping.is_neutral else RowShaping(shaping, tokens)
        constraint = state.request.constraint
        form = None if constraint is None else constraint.begin(state.project)
        return ActiveSequence(state, sample, self._num_begun, tokens, rope_shift, search, row, form)

    def _chosen(self, num_rows: Mapping[str, int] | None) -> list[ActiveSequence]:
        """Return the sequences that get a token, those that began first of each project."""
        active = [sequence for sequence in self._admission.active if sequence.held is None]
        if num_rows is None:
            return active[: self._max_sequences]
        left = Counter(num_rows)
        chosen = []
        for sequence in active:
            if left[sequence.state.project] > 0:
                left[sequence.state.project] -= 1
                chosen.append(sequence)
        return chosen

    def _limit(self, request: SampleRequest) -> int:
        """Return the longest completion that the request and the context allow."""
        room = self._info.max_context_tokens - len(request.prompt_tokens)
        return min(request.max_tokens, room)

    def _decode(self, rows: Sequence[ActiveSequence]) -> list[SampledSequence]:
        logits = self._decoding.decode(
            [
                DecodeSequence(
                    sequence.blocks,
                    sequence.state.weights,
                    sequence.tokens,
                    sequence.num_cached,
                    sequence.rope_shift,
                )
                for sequence in rows
            ]
        )
        # One that gave way reads its own tokens again: what follows them is known.
        fresh = [index for index, sequence in enumerate(rows) if sequence.is_caught_up]
        for sequence in rows:
            sequence.num_cached += 1
        if len(fresh) == len(rows):
            return self._take_tokens(rows, logits)
        return self._take_tokens([rows[index] for index in fresh], logits[fresh]) if fresh else []

    def _take_tokens(
        self, sequences: Sequence[ActiveSequence], logits_RV: Tensor
    ) -> list[SampledSequence]:
        """Draw tokens of sequences that may go on, and hold the logits of the others."""
        began_s = time.monotonic()
        may_draw = are_masked([one.constraint for one in sequences], self._mask_wait_s)
        # Of a step: groups that begin in it are taken one after the other.
        self._mask_wait_s = max(self._mask_wait_s - (time.monotonic() - began_s), 0.0)
        versions = [one.state.version for one in sequences]
        if all(may_draw):
            return self._draw(sequences, logits_RV, versions)
        for row, sequence in enumerate(sequences):
            if not may_draw[row]:
                # Samples that begin share the logits of their prompt. Others are copied: a view
                # would keep the whole step's.
                logits_V = logits_RV[row] if logits_RV.stride(0) == 0 else logits_RV[row].clone()
                sequence.held = HeldLogits(logits_V, versions[row])
        rows = [row for row, may in enumerate(may_draw) if may]
        if not rows:
            return []
        return self._draw(
            [sequences[row] for row in rows], logits_RV[rows], [versions[row] for row in rows]
        )

    def _draw_held(self, wait_s: float) -> list[SampledSequence]:
        """Draw tokens of sequences whose masks are computed by now; return what finished."""
        held = [(one, one.held) for one in self._admission.active if one.held is not None]
        may_draw = are_masked([one.constraint for one, _ in held], wait_s)
        drawn = [pair for pair, may in zip(held, may_draw, strict=True) if may]
        if not drawn:
            return []
        for sequence, _ in drawn:
            sequence.held = None
        return self._draw(
            [sequence for sequence, _ in drawn],
            torch.stack([logits.logits_V for _, logits in drawn]),
            [logits.version for _, logits in drawn],
        )

    def _draw(
        self, sequences: Sequence[ActiveSequence], logits_RV: Tensor, versions: Sequence[int]
    ) -> list[SampledSequence]:
        finished = []
        drawn = draw_tokens(sequences, logits_RV, versions)
        for sequence, token in zip(sequences, drawn, strict=True):
            reason = "constraint" if token is None else self._take(sequence, token)
            if reason is not None:
                finished.append(self._finish(sequence, reason))
        return finished

    def _take(self, sequence: ActiveSequence, sampled: SampledToken) -> str | None:
        if not np.isfinite(sampled.logprob):
            return "error"
        state, request = sequence.state, sequence.state.request
        sequence.tokens.append(sampled.token)
        if sequence.shaping is not None:
            sequence.shaping.note(sampled.token)
        if sequence.constraint is not None:
            sequence.constraint.note(sampled.token)
        sequence.logprobs.append(sampled.logprob)
        sequence.versions.append(sampled.version)
        sequence.topk.append(sampled.topk)
        if state.listener is not None:
            state.listener.token(sequence.sample_index, sampled)
        search = sequence.stop_search
        if search is not None and len(sequence.logprobs) <= request.min_tokens:
            search.pass_over(sampled.token)
        elif search is not None and search.push(sampled.token):
            return "stop"
        if sampled.token in request.stop_tokens:
            return "stop"
        if sequence.constraint is not None and sequence.constraint.has_ended():
            return "stop"
        return "length" if len(sequence.logprobs) >= self._limit(request) else None

    def _finish(self, sequence: ActiveSequence, reason: str) -> SampledSequence:
        state = sequence.state
        if reason == "error":
            self._cache.distrust(sequence.blocks)
        else:
            self._cache.keep(sequence)
        self._admission.leave(sequence)
        if state.listener is not None:
            state.listener.end(sequence.sample_index, reason)
        state.num_unfinished -= 1
        if state.num_unfinished == 0:
            self._forget(state)
        return sequence.sampled(reason)

    def _forget(self, state: RequestState) -> None:
        del self._states[state.id]
        self._following.pop(state.id, None)
        if state.weights is not None:
            self._versions.release(state.weights)


def _decoding(engine: Engine, max_sequences: int, cache_bytes: int) -> Decoding:
    model = engine.model
    if isinstance(model, FallbackModel):
        return RecomputeDecoding(model, engine.versions)
    if not isinstance(model, Decoder):
        raise TypeError(f"no sampler for a {type(model).__name__}")
    per_block = block_bytes(model.config, engine.base.embedding.dtype)
    if cache_bytes < per_block:
        raise ConfigError(
            f"cache_bytes is {cache_bytes}, and {BLOCK_TOKENS} tokens of this model take "
            f"{per_block}; raise it"
        )
    # More than all sequences of the greatest length would never be used.
    most = (max_sequences + MAX_PROMPTS) * blocks_for(engine.info.max_context_tokens)
    return CachedDecoding(model, engine.base, engine.versions, min(cache_bytes // per_block, most))
