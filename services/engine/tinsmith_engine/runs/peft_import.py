"""An adapter of another tool as the weights of a run.

A run adapts all attention projections, all MLP projections, the unembedding, or any of these, at
one rank. A PEFT adapter may leave modules of a kind out: these get A and B of zeros, which is
the same model. It stays so in training, since the gradient of each is a product with the other.
What a
run cannot be is refused, and the error names the setting.

Settings and header are checked against the base model first (`plan_import`); only then are
numbers read (`read_import`). A hostile file then cannot cause a larger allocation than an
adapter of this model has.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinsmith_engine.arena.adapter_targets import TargetSpec
from tinsmith_engine.base.types import LoraConfig
from tinsmith_engine.files.base_copies import ADVICE, check_copies, is_copy_name
from tinsmith_engine.files.weight_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    TensorEntry,
    read_header_of,
)
from tinsmith_engine.runs.run_store import MAX_RANK
from tinsmith_runtime.errors import (
    AdapterUnsupportedError,
    CheckpointIncompatibleError,
    FileRefusedError,
)

PEFT_PREFIX = "base_model.model."
MAX_SETTINGS_BYTES = 2**20

_FLOATS = frozenset({"F32", "F16", "BF16"})
_EMPTY: tuple[object, ...] = (None, False, 0, "", [], {})
# They say where the adapter came from, how it was trained, or what the tensors' names say as well.
_DESCRIPTIVE = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "ensure_weight_tying",
    }
)
# They matter beside a setting that is refused, or chose the initial weights.
_DEPENDENT = frozenset({"corda_config", "eva_config", "loftq_config", "qalora_group_size"})
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"})
# Others change the base model's weights before the adapter is added to them.
_HARMLESS_INITS = ("gaussian", "orthogonal", "eva")


def plan_import(
    settings: bytes, header: Mapping[str, TensorEntry], targets: Sequence[TargetSpec]
) -> LoraConfig:
    """Return the configuration of a run that is the same model as an adapter.

    Copies of the base model's embedding and unembedding, which PEFT saves beside an adapter of
    these, are passed over; whether they are copies is seen when numbers are read.

    Args:
        settings: The `adapter_config.json`.
        header: The tensors of its weights, as `read_header` returned them.
        targets: The modules of the base model that take adapters.

    Raises:
        FileRefusedError: If the settings are not a JSON object.
        AdapterUnsupportedError: If a setting has no counterpart here; `setting` names it.
        CheckpointIncompatibleError: If a tensor does not fit the base model; `tensor` names it.
    """
    found = _parse_settings(settings)
    rank, alpha = _check_settings(found)
    kinds = _check_tensors(header, targets, rank)
    return LoraConfig(
        rank=rank,
        seed=0,
        alpha=alpha,
        train_attention="attention" in kinds,
        train_mlp="mlp" in kinds,
        train_unembedding="unembedding" in kinds,
    )


def read_import(
    path: Path, config: LoraConfig, targets: Sequence[TargetSpec], base_dir: Path
) -> dict[str, Tensor]:
    """Return the tensors of a planned import: float32, named and shaped as a run's own export.

    Args:
        path: Of the weights.
        config: As it was planned.
        targets: The modules of the base model that take adapters.
        base_dir: The files of the base model.

    Raises:
        FileRefusedError: If the numbers cannot be read.
        CheckpointIncompatibleError: If a tensor holds NaN or infinity, or is an embedding or
            unembedding other than the base model's.
    """
    check_copies(path, read_header_of(path), base_dir)
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as stored:
            known = set(stored.keys())
            for target in targets:
                if not target.is_adapted_by(config):
                    continue
                for name, shape in _shapes_of(target, config.rank).items():
                    if name in known:
                        tensors[name] = stored.get_tensor(name).to(torch.float32).contiguous()
                    else:
                        tensors[name] = torch.zeros(shape)
    except (SafetensorError, OSError) as error:
        raise FileRefusedError(
            f"{ADAPTER_FILE} cannot be read: {error}", file=ADAPTER_FILE
        ) from error
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointIncompatibleError(f"tensor {name} holds NaN or infinity", tensor=name)
    return tensors


def _parse_settings(settings: bytes) -> dict[str, Any]:
    if len(settings) > MAX_SETTINGS_BYTES:
        raise FileRefusedError(
            f"{ADAPTER_CONFIG_FILE} has {len(settings)} bytes, more than {MAX_SETTINGS_BYTES}",
            file=ADAPTER_CONFIG_FILE,
        )
    try:
        found = json.loads(settings.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileRefusedError(
            f"{ADAPTER_CONFIG_FILE} is not JSON: {str(error)[:200]}", file=ADAPTER_CONFIG_FILE
        ) from error
    if not isinstance(found, dict):
        raise FileRefusedError(
            f"{ADAPTER_CONFIG_FILE} is not a JSON object", file=ADAPTER_CONFIG_FILE
        )
    return found


def _check_settings(found: Mapping[str, Any]) -> tuple[int, float]:
    """Return rank and alpha."""
    if found.get("peft_type") != "LORA":
        raise _unsupported("peft_type", found.get("peft_type"), "only LORA is taken")
    if found.get("task_type") not in (None, "CAUSAL_LM"):
        raise _unsupported("task_type", found["task_type"], "only CAUSAL_LM is taken")
    rank = found.get("r")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise _unsupported("r", rank, f"it must be 1 to {MAX_RANK}")
    alpha = found.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e30:
        raise _unsupported("lora_alpha", alpha, "it must be positive and finite")
    if found.get("bias", "none") != "none":
        raise _unsupported("bias", found["bias"], "runs train no biases")
    init = found.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or init in _HARMLESS_INITS):
        raise _unsupported(
            "init_lora_weights", init, "it changes the base model; convert the adapter with PEFT"
        )
    if found.get("modules_to_save") not in (None, []):
        raise _unsupported("modules_to_save", found["modules_to_save"], ADVICE)
    for setting, value in found.items():
        is_known = setting in _DESCRIPTIVE | _DEPENDENT | _READ
        if not is_known and not any(type(value) is type(e) and value == e for e in _EMPTY):
            raise _unsupported(setting, value, "runs here have nothing like it")
    if found.get("use_rslora") not in (None, True, False):
        raise _unsupported("use_rslora", found["use_rslora"], "it must be true or false")
    if found.get("use_rslora"):
        # Its factor is alpha / sqrt(r), ours alpha / r.
        alpha = alpha * math.sqrt(rank)
    # The contract has alpha as float32; a run made from the checkpoint must agree to the bit.
    (rounded,) = struct.unpack("<f", struct.pack("<f", alpha))
    if rounded <= 0.0:
        raise _unsupported("lora_alpha", alpha, "it is too small for float32")
    return rank, rounded


def _check_tensors(
    header: Mapping[str, TensorEntry], targets: Sequence[TargetSpec], rank: int
) -> set[str]:
    """Return which kinds of modules the tensors adapt."""
    shapes: dict[str, tuple[int, ...]] = {}
    kind_of: dict[str, str] = {}
    for target in targets:
        for name, shape in _shapes_of(target, rank).items():
            shapes[name], kind_of[name] = shape, target.kind
    for name, entry in header.items():
        if is_copy_name(name) and name not in shapes:
            if entry.dtype not in _FLOATS:
                raise _incompatible(name, f"has dtype {entry.dtype}, not F32, F16 or BF16")
            continue
        if ".lora_embedding_" in name:
            raise _incompatible(name, f"is of the embedding, which runs do not adapt; {ADVICE}")
        if name not in shapes:
            raise _incompatible(name, "is of no linear layer of the base model that takes adapters")
        if entry.shape != shapes[name]:
            raise _incompatible(
                name, f"has shape {list(entry.shape)}, rank {rank} here needs {list(shapes[name])}"
            )
        if entry.dtype not in _FLOATS:
            raise _incompatible(name, f"has dtype {entry.dtype}, not F32, F16 or BF16")
        other = name.replace(".lora_A.", ".lora_B.")
        other = name.replace(".lora_B.", ".lora_A.") if other == name else other
        if other not in header:
            raise _incompatible(other, "is missing, its counterpart is there")
    kinds = {kind_of[name] for name in header if name in kind_of}
    if not kinds:
        raise CheckpointIncompatibleError(
            f"{ADAPTER_FILE} holds no tensor of an adapter", file=ADAPTER_FILE
        )
    return kinds


def _shapes_of(target: TargetSpec, rank: int) -> dict[str, tuple[int, ...]]:
    """Return PEFT's names of the tensors of a target, with their shapes."""
    shapes: dict[str, tuple[int, ...]] = {
        PEFT_PREFIX + name: (rank, target.num_inputs) for name in target.a_names
    }
    for name, num_outputs in zip(target.b_names, target.num_outputs, strict=True):
        shapes[PEFT_PREFIX + name] = (num_outputs, rank)
    return shapes


def _unsupported(setting: str, value: object, problem: str) -> AdapterUnsupportedError:
    return AdapterUnsupportedError(
        f"the adapter has {setting} = {value!r:.160}; {problem}", setting=setting
    )


def _incompatible(name: str, problem: str) -> CheckpointIncompatibleError:
    return CheckpointIncompatibleError(f"tensor {name} {problem}", tensor=name)
