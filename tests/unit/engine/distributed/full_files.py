"""Files of a full-parameter run, read and written by one process without a group."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from tinsmith_engine import FullConfig, RunState
from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.distributed import fsdp_files


def read_state(folder: Path, layout: ParameterLayout) -> RunState:
    state = json.loads((folder / fsdp_files.STATE_FILE).read_text())
    rows = {key: torch.zeros(layout.width) for key in ("theta", "m", "v")}
    if state["has_gradient"]:
        rows["grad"] = torch.zeros(layout.width)
    with warnings.catch_warnings():
        # torch.distributed.checkpoint warns about its own deprecated calls.
        warnings.simplefilter("ignore")
        for name, tensors in _parts(rows, layout).items():
            reader = HuggingFaceStorageReader(str(folder / name))
            load(tensors, storage_reader=reader, no_dist=True)
    return RunState(config=FullConfig(), tensors=rows, **state)


def write_state(state: RunState, layout: ParameterLayout, folder: Path) -> None:
    for name, tensors in _parts(state.tensors, layout).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        # Views of one row: safetensors would refuse memory that tensors share.
        copies = {key: tensor.clone() for key, tensor in tensors.items()}
        save_file(copies, folder / name / "model-00001-of-00001.safetensors", {"format": "pt"})
    facts = {
        "version": state.version,
        "adam_steps": state.version if state.adam_steps is None else state.adam_steps,
        "has_gradient": state.has_gradient,
    }
    (folder / fsdp_files.STATE_FILE).write_text(json.dumps(facts))


def _parts(
    rows: dict[str, torch.Tensor], layout: ParameterLayout
) -> dict[str, dict[str, torch.Tensor]]:
    parts = {
        fsdp_files.MODEL_FOLDER: layout.views(rows["theta"]),
        fsdp_files.OPTIMIZER_FOLDER: {
            f"{moment}.{name}": view
            for moment in ("m", "v")
            for name, view in layout.views(rows[moment]).items()
        },
    }
    if "grad" in rows:
        parts[fsdp_files.GRADIENT_FOLDER] = layout.views(rows["grad"])
    return parts
