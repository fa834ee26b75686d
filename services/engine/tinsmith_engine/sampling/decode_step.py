"""How a sampler gets logits: from the packed decoder with a cache, or from a fallback module.

Both give float32 logits for one prompt at a time and for one next token of many sequences. A prompt
is computed alone, with the trainer's own operations and shapes, so its scores are those of the
trainer's forward. The logits after its last token are computed by themselves, and those of other
positions in chunks that begin at multiples of the chunk: what else is asked about a prompt changes
no bit of what is sampled, nor of another score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.base.types import ImageInput, Published
from tinsmith_engine.loading.hf_fallback import FallbackModel
from tinsmith_engine.lora.lora import LoraTarget
from tinsmith_engine.model.decoder import Bound, Decoder
from tinsmith_engine.model.decoder_weights import AdapterWeights, DecoderWeights, use_adapters
from tinsmith_engine.model.linear import AdaptedRows, LinearTarget
from tinsmith_engine.model.lm_head import chunk_rows
from tinsmith_engine.model.model_protocol import BoundRows
from tinsmith_engine.packing.images import rope_positions
from tinsmith_engine.packing.packing import PackedRows, pack
from tinsmith_engine.runs.weight_versions import VersionStore
from tinsmith_engine.sampling.block_pool import blocks_for
from tinsmith_engine.sampling.decode_linear import decode_weights
from tinsmith_engine.sampling.kv_cache import DecodeAttention, KvCache, PrefillAttention


@dataclass(frozen=True, slots=True)
class DecodeSequence:
    """A sequence whose next token is wanted."""

    blocks: Sequence[int]
    """Where it is cached."""
    weights: Published | None
    tokens: Sequence[int]
    """Prompt and completion."""
    position: int
    """Of the token to be read; those before it are cached, and those behind it not looked at."""
    rope_shift: int = 0
    """What the rotary position of a token of the completion is ahead of its place."""


class Prefilled(NamedTuple):
    """What reading a prompt gave."""

    last: Tensor
    """Logits after the last token, [1, V]."""
    scored: Iterator[tuple[int, Tensor]]
    """Logits of earlier positions in chunks [rows, V], each with the position of its first row; the
    first chunk may begin before what was asked for. Computed as they are taken."""


class Decoding(Protocol):
    """Source of logits."""

    @property
    def num_blocks(self) -> int:
        """Of the cache; 0 where nothing is cached."""

    @property
    def cache_bytes(self) -> int:
        """Memory of all blocks."""

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of the cache a sequence of this length takes."""

    def prefill(
        self,
        weights: Published | None,
        tokens: Sequence[int],
        blocks: Sequence[int],
        images: Sequence[ImageInput] = (),
        *,
        first_scored: int,
    ) -> Prefilled:
        """Read a prompt of T tokens into blocks; positions `first_scored` to T - 2 are scored."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks to others."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Empty blocks whose numbers may not be finite."""

    def decode(self, rows: Sequence[DecodeSequence]) -> Tensor:
        """Return next-token logits [rows, V], float32."""


class CachedDecoding:
    """The packed decoder over a cache in blocks."""

    def __init__(
        self, decoder: Decoder, base: DecoderWeights, versions: VersionStore, num_blocks: int
    ) -> None:
        self._decoder, self._base, self._versions = decoder, base, versions
        self._device = base.embedding.device
        self._cache = KvCache(decoder.config, num_blocks, base.embedding)
        self._composed: dict[int | None, tuple[list[int | None], DecoderWeights]] = {}

    @property
    def num_blocks(self) -> int:
        """Of the cache."""
        return self._cache.num_blocks

    @property
    def cache_bytes(self) -> int:
        """Memory of all blocks."""
        return self._cache.num_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of the cache a sequence of this length takes."""
        return blocks_for(num_tokens)

    def prefill(
        self,
        weights: Published | None,
        tokens: Sequence[int],
        blocks: Sequence[int],
        images: Sequence[ImageInput] = (),
        *,
        first_scored: int,
    ) -> Prefilled:
        """Read a prompt of T tokens into blocks; positions `first_scored` to T - 2 are scored."""
        num_tokens = len(tokens)
        rows = pack(
            [[np.asarray(tokens, dtype=np.int64)]],
            quantum=self._decoder.row_quantum,
            device=self._device,
            positions=[[rope_positions(num_tokens, images)]] if images else None,
        )
        bound, lora = self._prompt_weights(weights, rows)
        with torch.no_grad():
            cos, sin = self._decoder.rotary(rows.positions_N)
            attention = PrefillAttention(self._cache, blocks, num_tokens, rows, self._decoder.split)
            placed = [(image.position, image) for image in images]
            embedded = self._decoder.embed(bound, rows.tokens_N, placed)
            hidden = self._decoder.forward(bound, embedded, cos, sin, attention, None)
            head = bound.head if lora is None else _adapted_head(bound.head, lora)
            last = self._head_rows(bound, head, hidden, num_tokens - 1, num_tokens)
        return Prefilled(last, self._chunks(bound, head, hidden, first_scored, num_tokens - 1))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks to others."""
        self._cache.copy(sources, targets)

    def clear(self, blocks: Sequence[int]) -> None:
        """Empty blocks whose numbers may not be finite."""
        self._cache.clear(blocks)

    def _prompt_weights(
        self, weights: Published | None, rows: PackedRows
    ) -> tuple[DecoderWeights, LoraTarget | None]:
        """Return the weights of a prompt's rows, and the adapter of the unembedding."""
        bound: Bound = self._base if weights is None else self._versions.bound(weights)
        if isinstance(bound, DecoderWeights):
            return use_adapters(bound, [], rows.token_rows), None
        used: BoundRows[Bound] = BoundRows(rows.segments[0], bound, accumulates=True)
        return use_adapters(self._base, [used], rows.token_rows), self._decoder.head_adapter(
            bound, 0
        )

    def _chunks(
        self, weights: DecoderWeights, head: LinearTarget, hidden: Tensor, first: int, last: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield logits of rows, computed in chunks as the trainer's head does."""
        step = chunk_rows(self._decoder.config.vocab_size)
        for start in range(first - first % step, last, step):
            with torch.no_grad():
                logits = self._head_rows(weights, head, hidden, start, min(start + step, last))
            yield start, logits

    def _head_rows(
        self, weights: DecoderWeights, head: LinearTarget, hidden: Tensor, start: int, stop: int
    ) -> Tensor:
        num_rows = weights.head.split.rows_for(stop - start)
        filling = hidden[start : start + 1].expand(num_rows - (stop - start), -1)
        chunk = torch.cat([hidden[start:stop], filling])
        return self._logits(weights, head, chunk)[: stop - start]

    def decode(self, rows: Sequence[DecodeSequence]) -> Tensor:
        """Return next-token logits [rows, V], float32.

        Rows on the base model and on adapters share their passes; a full-parameter version has
        weights of its own and so a pass of its own.
        """
        parts: dict[int | None, list[int]] = {}
        for index, row in enumerate(rows):
            parts.setdefault(self._full_serial(row.weights), []).append(index)
        logits = torch.empty(len(rows), self._decoder.config.vocab_size, device=self._device)
        for serial, members in parts.items():
            # Equal adapters side by side: fewer tiles.
            members.sort(key=lambda i: _serial(rows[i].weights) or 0)
            logits[members] = self._decode_part(serial, [rows[index] for index in members])
        for serial in set(self._composed) - set(parts):
            del self._composed[serial]
        return logits

    def _decode_part(self, serial: int | None, rows: Sequence[DecodeSequence]) -> Tensor:
        num_rows = self._decoder.split.rows_for(len(rows))
        weights = self._compose(serial, rows, num_rows)
        filling = [0] * (num_rows - len(rows))
        positions = [row.position for row in rows]
        with torch.no_grad():
            newest = [row.tokens[row.position] for row in rows]
            tokens = torch.tensor(newest + filling, device=self._device)
            places = [at + row.rope_shift for at, row in zip(positions, rows, strict=True)]
            cos, sin = self._decoder.rotary(torch.tensor(places + filling, device=self._device))
            attention = DecodeAttention(
                self._cache,
                [row.blocks for row in rows],
                positions,
                num_rows,
                self._decoder.split,
            )
            embedded = self._decoder.embed(weights, tokens, ())
            hidden = self._decoder.forward(weights, embedded, cos, sin, attention, None)
            return self._logits(weights, weights.head, hidden)[: len(rows)]

    def _compose(
        self, serial: int | None, rows: Sequence[DecodeSequence], num_rows: int
    ) -> DecoderWeights:
        used = [_serial(row.weights) for row in rows]
        # Filling rows use what the last row uses: a batch of one adapter stays one.
        used += [used[-1]] * (num_rows - len(rows))
        key, weights = self._composed.get(serial, ([], None))
        if weights is not None and key == used:
            return weights
        if serial is not None:
            published = rows[0].weights
            if published is None:
                raise AssertionError("a full-parameter part has a version")
            weights = decode_weights(self._versions.bound(published), [], [])
        else:
            distinct = {_serial(row.weights): row.weights for row in rows}
            published_list = [one for one in distinct.values() if one is not None]
            order = {one.serial: index for index, one in enumerate(published_list)}
            weights = decode_weights(
                self._base,
                [self._adapters(one) for one in published_list],
                [None if one is None else order[one] for one in used],
            )
        self._composed[serial] = (used, weights)
        return weights

    def _adapters(self, published: Published) -> AdapterWeights:
        bound: Bound = self._versions.bound(published)
        if not isinstance(bound, AdapterWeights):
            raise TypeError("a full-parameter version is not worn over the base model")
        return bound

    def _full_serial(self, published: Published | None) -> int | None:
        if published is None or not self._versions.tensors(published).is_full:
            return None
        return published.serial

    def _logits(self, weights: DecoderWeights, head: LinearTarget, hidden: Tensor) -> Tensor:
        eps = self._decoder.config.rms_eps
        normed, _ = self._decoder.ops.rms_norm(hidden, weights.final_norm.weight, eps)
        return head.forward(normed)[0].float()


class RecomputeDecoding:
    """A fallback module, run over the whole sequence for every token: slow, but correct."""

    def __init__(self, model: FallbackModel, versions: VersionStore) -> None:
        self._model, self._versions = model, versions
        self._base = model.bind(None)
        self.num_blocks = self.cache_bytes = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Return 0: nothing is cached."""
        del num_tokens
        return 0

    def prefill(
        self,
        weights: Published | None,
        tokens: Sequence[int],
        blocks: Sequence[int],
        images: Sequence[ImageInput] = (),
        *,
        first_scored: int,
    ) -> Prefilled:
        """Read a prompt of T tokens; positions `first_scored` to T - 2 are scored."""
        del blocks, images
        logits = self._logits(weights, tokens)
        return Prefilled(logits[-1:], iter([(first_scored, logits[first_scored:-1])]))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Do nothing: there are no blocks."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Do nothing: there are no blocks."""

    def decode(self, rows: Sequence[DecodeSequence]) -> Tensor:
        """Return next-token logits [rows, V], float32."""
        return torch.stack(
            [self._logits(row.weights, row.tokens[: row.position + 1])[-1] for row in rows]
        )

    def _logits(self, weights: Published | None, tokens: Sequence[int]) -> Tensor:
        bound = self._base if weights is None else self._versions.bound(weights)
        with torch.no_grad():
            return self._model.logits(bound, torch.tensor(tokens)[None])[0].float()


def _serial(published: Published | None) -> int | None:
    return None if published is None else published.serial


def _adapted_head(head: LinearTarget, lora: LoraTarget) -> LinearTarget:
    """Return the unembedding with one run's adapter on all rows."""
    return head.adapt((AdaptedRows(slice(None), lora),))
