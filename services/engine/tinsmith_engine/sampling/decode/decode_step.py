"""How a sampler gets logits: from the packed decoder with a cache, or from a fallback module.

Both give float32 logits for pieces of prompts, and for one next token of many sequences. Pieces of
many prompts are read in one pass with the trainer's own operations: scores are those of the
trainer's forward, wherever prompts are cut and whatever is read beside them. That holds on a CPU;
elsewhere a prompt is read whole. Logits of earlier positions are computed in chunks that begin at
multiples of the chunk: what else is asked about a prompt changes no bit of what is sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.base.types import ImageInput, IntArray, WeightVersion
from tinsmith_engine.loading.hf_fallback import FallbackModel
from tinsmith_engine.lora.lora import LoraTarget
from tinsmith_engine.model.decoder import Bound, Decoder
from tinsmith_engine.model.decoder_weights import AdapterWeights, DecoderWeights, use_adapters
from tinsmith_engine.model.linear import AdaptedRows, LinearTarget
from tinsmith_engine.model.lm_head import chunk_rows
from tinsmith_engine.model.model_protocol import BoundRows
from tinsmith_engine.packing.images import rope_positions
from tinsmith_engine.packing.packing import PackedRows, pack
from tinsmith_engine.products.split_products import padded_rows
from tinsmith_engine.runs.weight_versions import VersionStore
from tinsmith_engine.sampling.cache.block_pool import blocks_for
from tinsmith_engine.sampling.cache.kv_cache import DecodeAttention, KvCache
from tinsmith_engine.sampling.decode.decode_linear import decode_weights, head_weights
from tinsmith_engine.sampling.decode.prompt_attention import CachedPiece, PromptAttention


@dataclass(frozen=True, slots=True)
class DecodeSequence:
    """A sequence whose next token is wanted."""

    blocks: Sequence[int]
    """Where it is cached."""
    weights: WeightVersion | None
    tokens: Sequence[int]
    """Prompt and completion."""
    position: int
    """Of the token to be read; those before it are cached, and those behind it not looked at."""
    rope_shift: int = 0
    """What the rotary position of a token of the completion is ahead of its place."""


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Neighbouring tokens of a prompt that are to be read; those before them are cached."""

    weights: WeightVersion | None
    tokens: Sequence[int]
    """Of the whole prompt, T."""
    blocks: Sequence[int]
    """Where the prompt is cached."""
    start: int
    stop: int
    first_scored: int
    """Positions from here to T - 2 are scored; T - 1 if none is."""
    images: Sequence[ImageInput] = ()
    """Of a prompt that is read whole."""

    @property
    def ends_prompt(self) -> bool:
        """Whether nothing of the prompt is left behind it."""
        return self.stop == len(self.tokens)

    @property
    def scored(self) -> range:
        """The positions of the piece that are scored."""
        stop = min(self.stop, len(self.tokens) - 1)
        return range(max(self.start, self.first_scored), stop)

    @property
    def positions(self) -> IntArray:
        """Rotary positions, [T]; [3, T] with images."""
        if self.images:
            return rope_positions(self.stop, self.images)
        return np.arange(self.start, self.stop)


class Prefilled(NamedTuple):
    """What reading a piece gave."""

    last: Tensor | None
    """Logits after the last token of the prompt, [1, V]; None if the piece does not reach it."""
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

    @property
    def cuts_prompts(self) -> bool:
        """Whether a prompt may be read piece by piece, behind what the cache holds of it."""

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of the cache a sequence of this length takes."""

    def prefill(self, pieces: Sequence[PromptPiece]) -> list[Prefilled]:
        """Read pieces of different prompts into their blocks."""

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

    @property
    def cuts_prompts(self) -> bool:
        """Whether a prompt may be read piece by piece: elsewhere kernels depend on the shape."""
        return self._device.type == "cpu"

    def prefill(self, pieces: Sequence[PromptPiece]) -> list[Prefilled]:
        """Read pieces of different prompts into their blocks.

        As in `decode`, a full-parameter version has a pass of its own.
        """
        parts: dict[int | None, list[int]] = {}
        for index, piece in enumerate(pieces):
            parts.setdefault(self._full_serial(piece.weights), []).append(index)
        found: dict[int, Prefilled] = {}
        for serial, members in parts.items():
            # Pieces of one adapter are one segment.
            members.sort(key=lambda i: _serial(pieces[i].weights) or 0)
            read = self._read_part(serial, [pieces[index] for index in members])
            found.update(zip(members, read, strict=True))
        return [found[index] for index in range(len(pieces))]

    def _read_part(self, serial: int | None, pieces: Sequence[PromptPiece]) -> list[Prefilled]:
        segments = [
            (weights, list(members))
            for weights, members in itertools.groupby(pieces, key=lambda piece: piece.weights)
        ]
        counts_up = all(piece.start == 0 and not piece.images for piece in pieces)
        rows = pack(
            [
                [np.asarray(one.tokens[one.start : one.stop], dtype=np.int64) for one in members]
                for _, members in segments
            ],
            quantum=self._decoder.row_quantum,
            device=self._device,
            positions=None if counts_up else _positions(segments),
        )
        placed = [
            CachedPiece(row, piece.start, piece.stop, piece.blocks)
            for (_, members), places in zip(segments, rows.sequences, strict=True)
            for piece, (row, _) in zip(members, places, strict=True)
        ]
        frozen, adapted = self._prompt_weights(serial, [weights for weights, _ in segments], rows)
        with torch.no_grad():
            cos, sin = self._decoder.rotary(rows.positions_N)
            attention = PromptAttention(self._cache, placed, rows, self._decoder.split)
            images = [
                (place.row + image.position, image)
                for piece, place in zip(pieces, placed, strict=True)
                for image in piece.images
            ]
            embedded = self._decoder.embed(adapted, rows.tokens_N, images)
            hidden = self._decoder.forward(adapted, embedded, cos, sin, attention, None)
            ends = [
                (place.rows.stop - 1, piece.weights)
                for piece, place in zip(pieces, placed, strict=True)
                if piece.ends_prompt
            ]
            last = self._last_logits(frozen, hidden, ends) if ends else hidden[:0]
        logits = iter(torch.split(last, 1))
        return [
            Prefilled(
                next(logits) if piece.ends_prompt else None,
                self._scored(frozen, piece, hidden[place.rows]),
            )
            for piece, place in zip(pieces, placed, strict=True)
        ]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks to others."""
        self._cache.copy(sources, targets)

    def clear(self, blocks: Sequence[int]) -> None:
        """Empty blocks whose numbers may not be finite."""
        self._cache.clear(blocks)

    def _prompt_weights(
        self, serial: int | None, segments: Sequence[WeightVersion | None], rows: PackedRows
    ) -> tuple[DecoderWeights, DecoderWeights]:
        """Return the weights that all rows see, and those with the adapters of each segment."""
        if serial is not None:
            bound: Bound = self._versions.bound(_given(segments[0]))
            if not isinstance(bound, DecoderWeights):
                raise TypeError("a full-parameter version is weights of its own")
            return bound, use_adapters(bound, [], rows.token_rows)
        used: list[BoundRows[Bound]] = [
            BoundRows(place, self._versions.bound(weights), accumulates=True)
            for weights, place in zip(segments, rows.segments, strict=True)
            if weights is not None
        ]
        return self._base, use_adapters(self._base, used, rows.token_rows)

    def _last_logits(
        self,
        frozen: DecoderWeights,
        hidden: Tensor,
        ends: Sequence[tuple[int, WeightVersion | None]],
    ) -> Tensor:
        """Return the logits [ends, V] of rows, each given with its weights."""
        num_rows = frozen.head.split.rows_for(len(ends))
        filled = [*ends, *[ends[-1]] * (num_rows - len(ends))]
        chosen = hidden[torch.tensor([row for row, _ in filled], device=self._device)]
        head: LinearTarget = frozen.head
        if frozen is self._base:
            distinct = list(dict.fromkeys(weights for _, weights in ends if weights is not None))
            order = {weights: index for index, weights in enumerate(distinct)}
            head = head_weights(
                frozen,
                [self._adapters(one) for one in distinct],
                [None if weights is None else order[weights] for _, weights in filled],
            )
        return self._logits(frozen, head, chosen)[: len(ends)]

    def _scored(
        self, frozen: DecoderWeights, piece: PromptPiece, hidden: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield logits of a piece's rows, computed in chunks as the trainer's head does."""
        head, scored = frozen.head, piece.scored
        if scored and frozen is self._base and piece.weights is not None:
            lora = self._decoder.head_adapter(self._adapters(piece.weights), 0)
            head = head if lora is None else _adapted_head(head, lora)
        step = chunk_rows(self._decoder.config.vocab_size)
        at = scored.start
        while at < scored.stop:
            start = max(at - at % step, piece.start)
            at = min(start - start % step + step, scored.stop)
            with torch.no_grad():
                rows = start - piece.start, at - piece.start
                logits = self._head_rows(frozen, head, hidden, *rows)
            yield start, logits

    def _head_rows(
        self, weights: DecoderWeights, head: LinearTarget, hidden: Tensor, start: int, stop: int
    ) -> Tensor:
        # Products with an adapter are other kernels' below a tile.
        num_rows = padded_rows(stop - start, weights.head.split.row_tile)
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
            weights = decode_weights(self._versions.bound(_given(rows[0].weights)), [], [])
        else:
            distinct = {_serial(row.weights): row.weights for row in rows}
            handles = [one for one in distinct.values() if one is not None]
            order = {one.serial: index for index, one in enumerate(handles)}
            weights = decode_weights(
                self._base,
                [self._adapters(one) for one in handles],
                [None if one is None else order[one] for one in used],
            )
        self._composed[serial] = (used, weights)
        return weights

    def _adapters(self, handle: WeightVersion) -> AdapterWeights:
        bound: Bound = self._versions.bound(handle)
        if not isinstance(bound, AdapterWeights):
            raise TypeError("a full-parameter version is not worn over the base model")
        return bound

    def _full_serial(self, handle: WeightVersion | None) -> int | None:
        if handle is None or not self._versions.tensors(handle).is_full:
            return None
        return handle.serial

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
        self.cuts_prompts = False

    def blocks_for(self, num_tokens: int) -> int:
        """Return 0: nothing is cached."""
        del num_tokens
        return 0

    def prefill(self, pieces: Sequence[PromptPiece]) -> list[Prefilled]:
        """Read prompts, each by itself."""
        found = []
        for piece in pieces:
            logits = self._logits(piece.weights, piece.tokens)
            scored = iter([(piece.first_scored, logits[piece.first_scored : -1])])
            found.append(Prefilled(logits[-1:], scored))
        return found

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Do nothing: there are no blocks."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Do nothing: there are no blocks."""

    def decode(self, rows: Sequence[DecodeSequence]) -> Tensor:
        """Return next-token logits [rows, V], float32."""
        return torch.stack(
            [self._logits(row.weights, row.tokens[: row.position + 1])[-1] for row in rows]
        )

    def _logits(self, weights: WeightVersion | None, tokens: Sequence[int]) -> Tensor:
        bound = self._base if weights is None else self._versions.bound(weights)
        with torch.no_grad():
            return self._model.logits(bound, torch.tensor(tokens)[None])[0].float()


def _positions(
    segments: Sequence[tuple[WeightVersion | None, Sequence[PromptPiece]]],
) -> list[list[IntArray]]:
    """Return the rotary positions of all pieces: on three axes if one of them holds images."""
    found = [[piece.positions for piece in members] for _, members in segments]
    if any(piece.images for _, members in segments for piece in members):
        return [
            [np.broadcast_to(one, (3, one.shape[-1])) for one in positions] for positions in found
        ]
    return found


def _given(handle: WeightVersion | None) -> WeightVersion:
    if handle is None:
        raise AssertionError("a full-parameter part has a version")
    return handle


def _serial(handle: WeightVersion | None) -> int | None:
    return None if handle is None else handle.serial


def _adapted_head(head: LinearTarget, lora: LoraTarget) -> LinearTarget:
    """Return the unembedding with one run's adapter on all rows."""
    return head.adapt((AdaptedRows(slice(None), lora),))
