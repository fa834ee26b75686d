"""Files of a sharded full-parameter run: each rank writes its part, any number of ranks reads them.

A folder holds `state.json`, `model/`, `optimizer/` and, with a gradient pending, `gradient/`.
Each is a set of safetensors files as `torch.distributed.checkpoint` writes them for Hugging
Face.
No file is a pickle: the default storage of `torch.distributed.checkpoint` would write one for its
metadata, the Hugging Face storage keeps it in the headers of the safetensors files.

`export_model` writes what `AutoModelForCausalLM.from_pretrained` loads.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tinsmith_engine.arena.adam import SlotBound
from tinsmith_engine.distributed.fsdp_steps import FullRun
from tinsmith_engine.distributed.process_group import Ranks
from tinsmith_runtime.errors import CheckpointCorruptError

MODEL_FOLDER, OPTIMIZER_FOLDER, GRADIENT_FOLDER = "model", "optimizer", "gradient"
STATE_FILE = "state.json"
_MOMENTS = ("m", "v")
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")


def save_run(run: FullRun, folder: Path, ranks: Ranks) -> None:
    """Write a run; all ranks call this with a folder that they share."""
    parts: dict[str, Mapping[str, Tensor]] = {
        MODEL_FOLDER: run.module.parameters,
        OPTIMIZER_FOLDER: {
            f"{moment}.{name}": tensor
            for moment, tensors in zip(_MOMENTS, (run.m, run.v), strict=True)
            for name, tensor in tensors.items()
        },
    }
    if run.has_gradient:
        parts[GRADIENT_FOLDER] = run.module.gradients
    for name, tensors in parts.items():
        _save(tensors, HuggingFaceStorageWriter(str(folder / name), save_distributed=True))
    if ranks.is_first:
        state = {
            "version": run.version,
            "adam_steps": run.adam_steps,
            "has_gradient": run.has_gradient,
        }
        (folder / STATE_FILE).write_text(json.dumps(state, sort_keys=True))
    ranks.meet()


def load_run(run: FullRun, folder: Path) -> None:
    """Read a run that was saved with any number of ranks; all ranks call this.

    Raises:
        CheckpointCorruptError: A file is absent or cannot be read. The ranks then have to
            restore the run otherwise.
    """
    state = _read_state(folder)
    run.module.clear_gradients()
    parts: dict[str, dict[str, Tensor]] = {
        MODEL_FOLDER: {name: tensor.detach() for name, tensor in run.module.parameters.items()},
        OPTIMIZER_FOLDER: {
            f"{moment}.{name}": tensor
            for moment, tensors in zip(_MOMENTS, (run.m, run.v), strict=True)
            for name, tensor in tensors.items()
        },
    }
    if state["has_gradient"]:
        parts[GRADIENT_FOLDER] = dict(run.module.gradients)
    for name, tensors in parts.items():
        _load(tensors, folder / name)
    run.version, run.adam_steps = int(state["version"]), int(state["adam_steps"])
    run.has_gradient = bool(state["has_gradient"])
    run.bound = SlotBound.unknown()


def export_model(run: FullRun, base_directory: Path, folder: Path, ranks: Ranks) -> None:
    """Write a model in Hugging Face layout; all ranks call this with a folder that they share."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    _save(run.module.parameters, writer)
    ranks.meet()
    if ranks.is_first:
        shutil.rmtree(folder / "sharded")
        for pattern in _COMPANIONS:
            for file in base_directory.glob(pattern):
                if file.name != "model.safetensors.index.json":
                    shutil.copyfile(file, folder / file.name)
    ranks.meet()


def _save(tensors: Mapping[str, Tensor], writer: HuggingFaceStorageWriter) -> None:
    with _quiet():
        save({name: tensor.detach() for name, tensor in tensors.items()}, storage_writer=writer)


def _load(tensors: dict[str, Any], folder: Path) -> None:
    try:
        with _quiet():
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    except Exception as error:
        # It raises errors of many kinds, and wraps those of other ranks.
        raise CheckpointCorruptError(
            f"the checkpoint in {folder} cannot be read: {error}", folder=folder
        ) from error


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointCorruptError(
            f"{folder / STATE_FILE} cannot be read: {error}", folder=folder
        ) from error
    return state


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch.distributed.checkpoint warns about its own deprecated calls.
        warnings.simplefilter("ignore")
        yield
