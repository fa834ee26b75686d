"""From a directory or hub id to a model in memory.

Weights are read from safetensors only: a pickle can run code. Each tensor is copied straight into
its place in the base row, so loading never holds the model twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tinsmith_engine.rows import RowLayout
from tinsmith_runtime.errors import CheckpointIncompatibleError, ModelNotFoundError

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve_model(model_dir: str | Path) -> Path:
    """Return the local directory of a model, downloading it if it is a hub id.

    Raises:
        ModelNotFoundError: Neither a directory with a config.json nor a model that the hub gives.
    """
    path = Path(model_dir)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"directory {path} holds no config.json, so it is no model", model=path
            )
        return path
    # A hub id is `name` or `owner/name`; everything else was meant as a path.
    if path.is_absolute() or str(model_dir).startswith(".") or len(path.parts) > 2:
        raise ModelNotFoundError(f"there is no model directory {model_dir}", model=model_dir)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(str(model_dir), allow_patterns=_HUB_FILES))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ModelNotFoundError(
            f"model {model_dir} is neither a directory nor a model of the hub; one that is gated"
            " there needs HF_TOKEN",
            model=model_dir,
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"model {model_dir} is not a directory, and the hub did not give it"
            f" ({_gist(error)}); check the network, or give a directory",
            model=model_dir,
        ) from error


def _gist(error: Exception) -> str:
    """Return the first sentence of a library's error: what follows is advice for its own users."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].partition(". ")[0].removeprefix("Got: ")


def load_hf_config(directory: Path) -> Any:
    """Return the transformers configuration of a model directory.

    Raises:
        ModelNotFoundError: transformers does not know the architecture.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory)
    except (ValueError, KeyError, OSError) as error:
        raise ModelNotFoundError(
            f"{directory / 'config.json'} is not a model that transformers knows: {_gist(error)}",
            model=directory,
        ) from error


def stored_tensors(directory: Path) -> Mapping[str, Path]:
    """Return which safetensors file holds each tensor of a checkpoint.

    Raises:
        ModelNotFoundError: The directory has no safetensors weights that may be read.
    """
    try:
        return _stored_tensors(directory)
    except PermissionError as error:
        raise _unreadable(Path(error.filename or directory), directory) from error


def _stored_tensors(directory: Path) -> Mapping[str, Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
        found = {name: directory / file for name, file in files.items()}
        for file in sorted(set(found.values())):
            _check_readable(file, directory)
        return found
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ModelNotFoundError(
            f"directory {directory} holds no model.safetensors; convert the weights first",
            model=directory,
        )
    _check_readable(single, directory)
    with safe_open(single, framework="pt") as weights:
        return dict.fromkeys(weights.keys(), single)


def _check_readable(file: Path, directory: Path) -> None:
    # safetensors says of a file that it may not read that there is none.
    if file.exists() and not os.access(file, os.R_OK):
        raise _unreadable(file, directory)


def _unreadable(file: Path, directory: Path) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{file} can not be read by user {os.getuid()}: make it and its folder readable "
        "(chmod -R a+rX), or give the files to that user",
        model=directory,
    )


def read_row(
    directory: Path,
    layout: RowLayout,
    dtype: torch.dtype,
    device: torch.device,
    fused: Mapping[str, Sequence[str]] | None = None,
    stored_as: Mapping[str, str] | None = None,
) -> Tensor:
    """Return the weights of a checkpoint as one row of the layout.

    Args:
        directory: Of the checkpoint.
        layout: The tensors that are wanted.
        dtype: Of the row.
        device: Where the row is wanted.
        fused: Names under which the checkpoint may hold several neighbouring tensors as one, whose
            numbers are those of its parts in order.
        stored_as: For each tensor of the checkpoint, by its name here, its name there; None if it
            has the same names.

    Raises:
        CheckpointIncompatibleError: A tensor is absent or has another shape than the
            configuration implies.
    """
    files = stored_tensors(directory)
    fused = fused or {}
    stored_as = {name: name for name in files} if stored_as is None else stored_as
    row = torch.zeros(layout.width, dtype=dtype, device=device)
    places = {name: layout.view(row, name) for name in layout.entries}
    for name, parts in fused.items():
        if name in stored_as and parts[0] not in stored_as:
            places[name] = layout.fused(row, parts)
            for part in parts:
                del places[part]
    by_file: dict[Path, list[str]] = {}
    for name in places:
        if name not in stored_as:
            raise CheckpointIncompatibleError(f"{directory} lacks tensor {name}", tensor=name)
        by_file.setdefault(files[stored_as[name]], []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as weights:
            for name in names:
                place = places[name]
                tensor = weights.get_tensor(stored_as[name])
                if name in fused and tensor.dim() == place.dim() + 1:
                    tensor = tensor.flatten(0, 1)
                if tensor.shape != place.shape:
                    raise CheckpointIncompatibleError(
                        f"tensor {name} of {file} has shape {list(tensor.shape)}, "
                        f"the configuration says {list(place.shape)}",
                        tensor=name,
                    )
                place.copy_(tensor)
    return row
