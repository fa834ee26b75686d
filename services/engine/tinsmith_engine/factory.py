"""Loads a base model: the packed decoder if it can run it, else the fallback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tinsmith_engine.compiled_ops import compile_ops
from tinsmith_engine.decoder import Decoder, Ladders
from tinsmith_engine.decoder_config import DecoderConfig, decoder_config, full_layout
from tinsmith_engine.decoder_weights import LayerWeights, bind_weights
from tinsmith_engine.devices import prepare_device
from tinsmith_engine.fallback import FallbackModel
from tinsmith_engine.head import chunk_rows
from tinsmith_engine.loading import load_hf_config, read_row, resolve_model, stored_tensors
from tinsmith_engine.models import Model
from tinsmith_engine.ops import EAGER, Ops
from tinsmith_engine.packing import PADDING_RULE
from tinsmith_engine.row_ladder import RowLadder, probe_ladder
from tinsmith_engine.rows import RowLayout
from tinsmith_engine.values import ModelInfo
from tinsmith_runtime.errors import InvalidFieldError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A base model in memory."""

    model: Model[Any]
    info: ModelInfo
    device: torch.device
    source: str
    """Where it came from, as the caller named it."""


@dataclass(frozen=True, slots=True)
class DecoderFiles:
    """A model directory that the packed decoder can run, and how it is wanted."""

    directory: Path
    config: DecoderConfig
    layout: RowLayout
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    tape_rows: int
    exact: bool


def whole_decoder(files: DecoderFiles) -> tuple[Decoder, Ladders]:
    """Return the decoder with all weights in this process, and its ladders."""
    row = read_row(files.directory, files.layout, files.dtype, files.device)
    ladders = Ladders(RowLadder(()), RowLadder(()))
    if files.exact:
        free = RowLadder(())
        weights = bind_weights(files.config, files.layout, row, None, free, free)
        ladders = find_ladders(weights.layers[0], weights.head.weight)
    decoder = Decoder(
        files.config, files.layout, row, ladders, files.ops, tape_rows=files.tape_rows
    )
    return decoder, ladders


def load_model(
    model_dir: str | Path,
    *,
    dtype: str,
    device: str,
    max_sequence_tokens: int,
    num_threads: int | None,
    micro_batch_tokens: int,
    tape_rows: int,
    exact: bool,
    compiled: bool,
    build: Callable[[DecoderFiles], tuple[Decoder, Ladders]] = whole_decoder,
    more_details: Mapping[str, object] | None = None,
) -> LoadedModel:
    """Load a base model; see `Engine.load`.

    `build` makes the packed decoder, `more_details` join the fingerprint.
    """
    if dtype not in DTYPES:
        raise InvalidFieldError("dtype", f"must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    directory = resolve_model(model_dir)
    hf_config = load_hf_config(directory)
    place = prepare_device(device)
    config = decoder_config(hf_config)
    model: Model[Any]
    found: dict[str, str] = {}
    if config is None:
        model, exactness = FallbackModel.load(directory, DTYPES[dtype], place), "fallback"
        text_config = hf_config.get_text_config()
        vocab_size = text_config.vocab_size
        max_positions = getattr(text_config, "max_position_embeddings", max_sequence_tokens)
    else:
        layout = full_layout(config, set(stored_tensors(directory)))
        ops = compile_ops(config, DTYPES[dtype], place) if compiled else EAGER
        model, ladders = build(
            DecoderFiles(directory, config, layout, DTYPES[dtype], place, ops, tape_rows, exact)
        )
        found = {"ops": ops.name, "rows": _rungs(ladders.layers), "head_rows": _rungs(ladders.head)}
        exactness = "exact" if exact else "fast"
        vocab_size, max_positions = config.vocab_size, config.max_positions
    details = {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": device if place.type == "cpu" else torch.cuda.get_device_name(place),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "exactness": exactness,
        "micro_batch_tokens": micro_batch_tokens,
        "attention_padding": PADDING_RULE,
        **found,
        **(more_details or {}),
    }
    info = ModelInfo(
        vocab_size=vocab_size,
        max_context_tokens=min(max_positions, max_sequence_tokens),
        dtype=dtype,
        num_parameters=model.full_layout.num_numbers,
        exactness=exactness,
        family=hf_config.model_type,
        fingerprint=" ".join(f"{key}={value}" for key, value in details.items()),
        details=details,
    )
    return LoadedModel(model, info, place, str(model_dir))


def _rungs(ladder: RowLadder) -> str:
    return "/".join(map(str, ladder.rungs)) or "any"


def find_ladders(layer: LayerWeights, head: torch.Tensor) -> Ladders:
    """Find the row counts at which the frozen products of a layer, and of the head, agree."""
    most = chunk_rows(len(head))
    return Ladders(
        probe_ladder(_layer_factors(layer)),
        probe_ladder([(head.t(), None), (head, None)], max_rows=most),
    )


def _layer_factors(layer: LayerWeights) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the factors of forward and backward; the shapes of all layers are those of one."""
    factors: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for unit in (layer.qkv, layer.o, layer.gate_up, layer.down):
        factors += [(unit.weight.t(), unit.bias), (unit.weight, None)]
    return factors
