"""The state of a run as files: snapshots, training checkpoints and sampler checkpoints.

All tensors are safetensors. A snapshot is the engine's rows as they are. A checkpoint is what users
know: a PEFT adapter (`adapter_config.json`, `adapter_model.safetensors`) or, for a full-parameter
run, `model.safetensors` with the names of the base model; and, to go on training,
`optimizer.safetensors` with the moments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save

from tinsmith_engine import AdapterConfig, Engine, FullConfig, RunState
from tinsmith_engine.files.weight_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MODEL_FILE,
    parse_tensors,
    weights_file,
)
from tinsmith_runtime.errors import CheckpointIncompatibleError

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.safetensors"

_MOMENTS = ("m", "v")


def snapshot_files(state: RunState) -> dict[str, bytes]:
    """Return the files of a snapshot."""
    return {STATE_FILE: save(_contiguous(state.tensors))}


def state_from_snapshot(
    files: Mapping[str, bytes], attributes: Mapping[str, Any], config: AdapterConfig
) -> RunState:
    """Return the state that a snapshot holds.

    Raises:
        CheckpointCorruptError: If the file is not what `snapshot_files` wrote.
    """
    tensors = parse_tensors(files, STATE_FILE)
    return RunState(
        config=config,
        version=int(attributes["version"]),
        tensors=tensors,
        has_gradient=bool(attributes["has_gradient"]),
    )


def checkpoint_files(engine: Engine, run: str, *, with_optimizer: bool) -> dict[str, bytes]:
    """Return the files of a checkpoint; runs on the engine's thread."""
    tensors, adapter_config = engine.adapter_tensors(run)
    state = engine.export_state(run)
    if isinstance(state.config, FullConfig):
        files = {MODEL_FILE: save(_contiguous(tensors), {"format": "pt"})}
    else:
        files = {
            ADAPTER_CONFIG_FILE: json.dumps(adapter_config, indent=1, sort_keys=True).encode(),
            ADAPTER_FILE: save(_contiguous(tensors), {"format": "pt"}),
        }
    if with_optimizer:
        moments = {name: state.tensors[name] for name in _MOMENTS}
        files[OPTIMIZER_FILE] = save(_contiguous(moments))
    return files


def apply_checkpoint(
    engine: Engine,
    run: str,
    files: Mapping[str, bytes],
    attributes: Mapping[str, Any],
    *,
    include_optimizer: bool,
) -> int:
    """Replace the state of a run by a checkpoint; runs on the engine's thread.

    The run is unchanged if this raises.

    Returns:
        The version of the loaded state, 0 without the optimizer.

    Raises:
        CheckpointIncompatibleError: If the checkpoint does not fit the run.
        CheckpointCorruptError: If a file cannot be read.
    """
    before = engine.export_state(run)
    tensors = parse_tensors(files, weights_file(before.config))
    moments = parse_tensors(files, OPTIMIZER_FILE) if include_optimizer else {}
    for name in _MOMENTS if include_optimizer else ():
        if name not in moments or moments[name].shape != before.tensors[name].shape:
            raise CheckpointIncompatibleError(
                f"the optimizer state of the checkpoint does not fit {run}: {name} is missing or "
                "has another size; load it into a run of the same configuration",
                run=run,
            )
    try:
        engine.load_adapter_tensors(run, tensors)
        loaded = engine.export_state(run)
        version = int(attributes["version"]) if include_optimizer else 0
        fresh = {name: torch.zeros_like(loaded.tensors[name]) for name in _MOMENTS}
        engine.import_state(
            run,
            RunState(
                config=loaded.config,
                version=version,
                tensors={"theta": loaded.tensors["theta"], **fresh, **moments},
                has_gradient=False,
            ),
        )
    except BaseException:
        engine.import_state(run, before)
        raise
    return version


def _contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
