"""Loads a base model: the packed decoder if it can run it, else the fallback."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.base.devices import prepare_device
from tinsmith_engine.base.types import ImageRules, ModelInfo
from tinsmith_engine.files.base_copies import holds_another_head
from tinsmith_engine.files.hub_files import (
    load_hf_config,
    read_parameters,
    resolve_model,
    stored_tensors,
)
from tinsmith_engine.loading.hf_fallback import FallbackModel
from tinsmith_engine.model.attention import PRODUCTS_RULE
from tinsmith_engine.model.compiled_ops import compile_ops
from tinsmith_engine.model.decoder import Decoder
from tinsmith_engine.model.decoder_config import (
    DecoderConfig,
    decoder_config,
    full_layout,
    fused_experts,
    stored_names,
)
from tinsmith_engine.model.decoder_weights import LayerWeights, bind_weights
from tinsmith_engine.model.experts import MoeMlp
from tinsmith_engine.model.mlp import DenseMlp
from tinsmith_engine.model.model_protocol import Model
from tinsmith_engine.model.vision import VisionTower
from tinsmith_engine.packing.images import read_image_rules
from tinsmith_engine.packing.packing import PADDING_RULE, SEGMENT_ROWS
from tinsmith_engine.products.ops import EAGER, Ops
from tinsmith_engine.products.split_products import (
    WHOLE,
    Factor,
    KSplit,
    candidates,
    check_split,
    with_small_products,
)
from tinsmith_runtime.errors import ExactnessUnavailableError, InvalidFieldError

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_EMBEDDING = re.compile(r"emb|wte|wpe")

NOT_KEPT = (
    "going on without the promise that tenants do not touch each other's bits; capabilities and "
    "checkpoints say so (exactness: fast)"
)
REMEDY = (
    "start with --exact auto (exact = auto) to go on without the promise that tenants do not touch "
    "each other's bits"
)

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
    layout: ParameterLayout
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    checkpoint_activations_over_tokens: int
    exact: bool | None
    stored_as: Mapping[str, str]
    """The name in the files of each tensor of the layout."""
    vision: VisionTower | None


def whole_decoder(files: DecoderFiles) -> Decoder:
    """Return the decoder with all weights in this process."""
    flat = read_parameters(
        files.directory,
        files.layout,
        files.dtype,
        files.device,
        fused_experts(files.config),
        files.stored_as,
    )
    weights = bind_weights(files.config, files.layout, flat, None, WHOLE)
    split = find_split(weights.layers, weights.head.weight, exact=files.exact)
    return Decoder(
        files.config,
        files.layout,
        flat,
        split,
        files.ops,
        checkpoint_activations_over_tokens=files.checkpoint_activations_over_tokens,
        vision=files.vision,
    )


def _accept(loaded: LoadedModel) -> None:
    """Accept a model: one process agrees with itself."""


def _accept_family(family: str) -> None:
    """Accept any type of model: one device holds it, or does not."""


@dataclass(frozen=True, slots=True)
class ModelSharding:
    """How a base model is sharded: all that differs between loading it here and on several ranks.

    Attributes:
        build: Makes the packed decoder.
        check_family: Raises for a type of model that cannot lie so, before a weight is read.
        details: Join the fingerprint.
        check: Raises for a loaded model that cannot be served so.
        engine_arguments: What the engine's class takes after the model.
    """

    build: Callable[[DecoderFiles], Decoder] = whole_decoder
    check_family: Callable[[str], None] = _accept_family
    details: Mapping[str, object] = field(default_factory=dict)
    check: Callable[[LoadedModel], None] = _accept
    engine_arguments: tuple[Any, ...] = ()


IN_ONE_PROCESS = ModelSharding()


def load_model(
    model_dir: str | Path,
    *,
    dtype: str,
    device: str,
    max_sequence_tokens: int,
    num_threads: int | None,
    micro_batch_tokens: int,
    checkpoint_activations_over_tokens: int,
    exact: bool | None,
    compiled: bool,
    sharding: ModelSharding,
) -> LoadedModel:
    """Load a base model; see `Engine.load`."""
    if dtype not in DTYPES:
        raise InvalidFieldError("dtype", f"must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    directory = resolve_model(model_dir)
    hf_config = load_hf_config(directory)
    sharding.check_family(hf_config.model_type)
    place = prepare_device(device)
    config = decoder_config(hf_config)
    model: Model[Any]
    found: dict[str, str] = {}
    images: ImageRules | None = None
    if config is None:
        model, exactness = FallbackModel.load(directory, DTYPES[dtype], place), "fallback"
        text_config = hf_config.get_text_config()
        vocab_size = text_config.vocab_size
        max_positions = getattr(text_config, "max_position_embeddings", max_sequence_tokens)
    else:
        if config.is_tied and holds_another_head(directory):
            # As transformers does: the settings say that both are one, and the files that not.
            config = dataclasses.replace(config, is_tied=False)
        stored_as = stored_names(config, stored_tensors(directory).keys())
        layout = full_layout(config, stored_as.keys())
        ops = compile_ops(config, DTYPES[dtype], place) if compiled else EAGER
        vision = None
        if config.rope_axes is not None:
            images = read_image_rules(directory, hf_config)
            vision = VisionTower.load(directory, hf_config, images, DTYPES[dtype], place)
        decoder = sharding.build(
            DecoderFiles(
                directory,
                config,
                layout,
                DTYPES[dtype],
                place,
                ops,
                checkpoint_activations_over_tokens,
                exact,
                stored_as,
                vision,
            )
        )
        model, split = decoder, decoder.split
        found = {"ops": ops.name, "k_split": str(split)}
        exactness = "exact" if split.is_exact else "fast"
        vocab_size, max_positions = config.vocab_size, config.max_positions
    details = {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": device if place.type == "cpu" else torch.cuda.get_device_name(place),
        # Exact sums have one order whatever the number of threads.
        **({} if exactness == "exact" else {"threads": torch.get_num_threads()}),
        "dtype": dtype,
        "exactness": exactness,
        "micro_batch_tokens": micro_batch_tokens,
        "attention_padding": PADDING_RULE,
        "attention_by_products": PRODUCTS_RULE,
        "segment_rows": SEGMENT_ROWS,
        **found,
        **sharding.details,
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
        images=images,
        layers_without_adapters=find_unreached(model),
    )
    if info.layers_without_adapters:
        logger.info(
            "adapters do not reach all matrices",
            extra={"model": str(model_dir), "layers": list(info.layers_without_adapters)},
        )
    loaded = LoadedModel(model, info, place, str(model_dir))
    sharding.check(loaded)
    return loaded


def find_unreached(model: Model[Any]) -> list[str]:
    """Return the kinds of matrices that no adapter reaches, embeddings aside.

    They are paths of modules, with `*` for numbers.
    """
    targets = {name for target in model.lora_targets for name in target.names}
    matrices = (
        name.removesuffix(".weight")
        for name, entry in model.full_layout.entries.items()
        if len(entry.shape) > 1
    )
    unreached = {
        _NUMBER.sub("*", name)
        for name in (*matrices, *model.other_modules)
        if name not in targets and not _EMBEDDING.search(name.rpartition(".")[2])
    }
    return sorted(unreached)


def find_split(layers: Sequence[LayerWeights], head: torch.Tensor, *, exact: bool | None) -> KSplit:
    """Return how the sums of a model's products are cut on this machine.

    Raises:
        ExactnessUnavailableError: `exact` is True, and rows do not keep their bits however sums
            are cut.
    """
    if exact is False:
        return WHOLE
    factors = [*_layer_factors(layers), (head.t(), None), (head, None)]
    for split in candidates(head.dtype, head.device):
        if check_split(split, factors):
            return with_small_products(split, factors)
    problem = "matrix products of this model give a row other bits beside other rows"
    if exact:
        raise ExactnessUnavailableError(f"{problem}; {REMEDY}")
    logger.warning("%s: %s", problem, NOT_KEPT)
    return WHOLE


def _layer_factors(layers: Sequence[LayerWeights]) -> list[Factor]:
    """Return the factors of forward and backward.

    Layers have the shapes of one of two: the first with a dense MLP, the first with experts.
    """
    first = layers[0]
    targets = [first.qkv, first.o]
    factors: list[Factor] = []
    for kind in (DenseMlp, MoeMlp):
        mlp = next((layer.mlp for layer in layers if isinstance(layer.mlp, kind)), None)
        if isinstance(mlp, DenseMlp):
            targets += [mlp.gate_up, mlp.down]
        elif mlp is not None:
            targets.append(mlp.router)
            for weight in (mlp.gate_up.weight[0], mlp.down.weight[0]):
                factors += [(weight.t(), None), (weight, None)]
    for target in targets:
        factors += [(target.weight.t(), target.bias), (target.weight, None)]
    return factors
