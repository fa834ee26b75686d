"""The packed decoder over a base model that no rank holds as a whole.

Nothing of the decoder is written twice: it reads the embedding, one layer after the other, and the
head, and here each of these reads is a gathering (`sharded_base`). What was read before may be
overwritten then, so users of these weights must not keep them; the decoder does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

from tinsmith_engine.distributed.process_group import Ranks
from tinsmith_engine.distributed.sharded_base import (
    EMBEDDING,
    HEAD,
    GatherStream,
    ShardedBase,
)
from tinsmith_engine.loading.base_model import DecoderFiles, find_split
from tinsmith_engine.model.decoder import Bound, Decoder
from tinsmith_engine.model.decoder_config import DecoderConfig
from tinsmith_engine.model.decoder_weights import (
    DecoderWeights,
    LayerWeights,
    Norm,
    bind_layer,
)
from tinsmith_engine.model.linear import LinearTarget
from tinsmith_engine.model.model_protocol import RunTensors
from tinsmith_engine.products.ops import EAGER, Ops
from tinsmith_engine.products.split_products import WHOLE, KSplit
from tinsmith_runtime.errors import InvalidFieldError


class ShardedWeights(DecoderWeights):
    """Frozen weights, each part gathered when it is read; see `GatherStream` for the order."""

    _config: DecoderConfig
    _base: ShardedBase
    _stream: GatherStream
    _split: KSplit
    _ops: Ops
    _found: Sequence[LayerWeights]

    def __init__(
        self,
        config: DecoderConfig,
        base: ShardedBase,
        stream: GatherStream,
        split: KSplit,
        ops: Ops,
        layers: Sequence[LayerWeights] | None = None,
    ) -> None:
        found = layers or _Layers(config, base, stream, split, ops)
        # Not by assignment: the parent class is frozen.
        for name, value in zip(
            ("_config", "_base", "_stream", "_split", "_ops", "_found"),
            (config, base, stream, split, ops, found),
            strict=True,
        ):
            object.__setattr__(self, name, value)

    @property
    def embedding(self) -> Tensor:
        """The embedding [V, H]."""
        return self._base.blocks[0].layout.view(self._stream.take(0), EMBEDDING)

    @property
    def embedding_grad(self) -> None:
        """Frozen weights have no gradient."""

    @property
    def layers(self) -> Sequence[LayerWeights]:
        """The layers, gathered one by one."""
        return self._found

    @property
    def final_norm(self) -> Norm:
        """The final norm, which every rank holds."""
        return Norm(self._base.final_norm, None)

    @property
    def head(self) -> LinearTarget:
        """The unembedding."""
        index = self._base.head_block
        name = HEAD if index else EMBEDDING
        weight = self._base.blocks[index].layout.view(self._stream.take(index), name)
        return LinearTarget(weight=weight, split=self._split)

    @property
    def trains_input(self) -> bool:
        """Frozen weights end the backward at the first layer."""
        return False

    def with_layers(self, layers: Sequence[LayerWeights]) -> DecoderWeights:
        """Return the weights with other layers."""
        return ShardedWeights(
            self._config, self._base, self._stream, self._split, self._ops, layers
        )


class _Layers(Sequence[LayerWeights]):
    """The layers; reading one gathers it."""

    def __init__(
        self,
        config: DecoderConfig,
        base: ShardedBase,
        stream: GatherStream,
        split: KSplit,
        ops: Ops,
    ) -> None:
        self._config, self._base, self._stream = config, base, stream
        self._split, self._ops = split, ops

    def __len__(self) -> int:
        return self._config.num_layers

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        if isinstance(index, slice):
            raise TypeError("layers of a sharded base are in memory one at a time")
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.bind(index, self._stream.take(1 + index))

    def bind(self, index: int, row: Tensor) -> LayerWeights:
        """Return a layer from its gathered row."""
        layout = self._base.blocks[1 + index].layout
        return bind_layer(self._config, layout, row, index, self._split, self._ops)


class ShardedDecoder(Decoder):
    """A decoder whose base model lies in parts on all ranks."""

    def __init__(self, files: DecoderFiles, base: ShardedBase, split: KSplit) -> None:
        nothing = torch.empty(0, dtype=files.dtype, device=files.device)
        super().__init__(
            files.config,
            files.layout,
            nothing,
            split,
            files.ops,
            checkpoint_activations_over_tokens=files.checkpoint_activations_over_tokens,
        )
        self.base = base
        self.stream = GatherStream(base)

    def first_layers(self) -> Decoder:
        """Return the decoder itself: the ranks gather its layers together, in one order."""
        return self

    def initial_parameters(self) -> Tensor:
        """Refuse: no rank has the row.

        Raises:
            InvalidFieldError: Always.
        """
        raise _no_parameters()

    def bind(self, run: RunTensors | None) -> Bound:
        """Return the base model's weights, or the adapters of a group.

        Raises:
            InvalidFieldError: The run trains all weights.
        """
        if run is None:
            return ShardedWeights(self.config, self.base, self.stream, self.split, self.ops)
        if run.is_full:
            raise _no_parameters()
        return super().bind(run)


def sharded_decoder(
    ranks: Ranks,
) -> Callable[[DecoderFiles], Decoder]:
    """Return what builds a decoder that is sharded over all ranks; they call it together."""

    def build(files: DecoderFiles) -> Decoder:
        base = ShardedBase(files.config, files.layout, files.directory, files.dtype, ranks)
        ranks.meet()
        split = WHOLE
        if files.exact is not False:
            layer, head = _first_layer_and_head(files, base)
            split = find_split([layer], head, exact=files.exact)
        return ShardedDecoder(files, base, split)

    return build


def _first_layer_and_head(files: DecoderFiles, base: ShardedBase) -> tuple[LayerWeights, Tensor]:
    for index in (1, base.head_block):
        pending = base.begin_gather(index)
        if pending is not None:
            pending.wait()
    name = HEAD if base.head_block else EMBEDDING
    block = base.blocks[1]
    layer = bind_layer(files.config, block.layout, base.gathered(1), 0, WHOLE, EAGER)
    head = base.blocks[base.head_block]
    return layer, head.layout.view(base.gathered(base.head_block), name)


def _no_parameters() -> InvalidFieldError:
    return InvalidFieldError(
        "adapter.full", "needs the weights of the base model, which are spread over the ranks"
    )
