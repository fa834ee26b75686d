"""From a directory or hub id to a model in memory.

Weights are read from safetensors only: a pickle can run code. Each tensor is copied straight into
its place in the base row, so loading never holds the model twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.files.weight_files import TensorEntry, read_header_of
from tinsmith_runtime.errors import (
    CheckpointIncompatibleError,
    FileRefusedError,
    ModelNotFoundError,
)
from tinsmith_runtime.model_directories import model_directory

_CHUNK_NUMBERS = 16 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve_model(model_dir: str | Path) -> Path:
    """Return the local directory of a model, downloading it if it is a hub id.

    Raises:
        ModelNotFoundError: Neither a directory with a config.json nor a model that the hub gives.
    """
    directory = model_directory(model_dir)
    if directory is not None:
        return directory
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
        FileRefusedError: The file was cut, or is no safetensors file.
    """
    try:
        return _stored_tensors(directory)
    except PermissionError as error:
        raise _unreadable(Path(error.filename or directory), directory) from error


def _stored_tensors(directory: Path) -> Mapping[str, Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = _weight_map(index)
        for file in sorted(set(files.values())):
            if Path(file).name != file or file in ("", ".."):
                raise FileRefusedError(
                    f"{index.name} names {file!r}, which is no file beside it; list the files of "
                    "the model alone",
                    file=index.name,
                )
        found = {name: directory / file for name, file in files.items()}
        for path in sorted(set(found.values())):
            _check_readable(path, directory)
        return found
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ModelNotFoundError(
            f"directory {directory} holds no model.safetensors; convert the weights first",
            model=directory,
        )
    _check_readable(single, directory)
    return dict.fromkeys(read_header_of(single), single)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileRefusedError(
            f"{index.name} has no map of tensors to files ({type(error).__name__}); copy it again",
            file=index.name,
        ) from error
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise FileRefusedError(
            f"the weight_map of {index.name} does not name a file for each tensor; copy it again",
            file=index.name,
        )
    return files


def _check_readable(file: Path, directory: Path) -> None:
    # safetensors says of a file that it may not read that there is none.
    if file.exists() and not os.access(file, os.R_OK):
        raise _unreadable(file, directory)


def _unreadable(file: Path, directory: Path) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{file} cannot be read by user {os.getuid()}: make it and its folder readable "
        "(chmod -R a+rX), or give the files to that user",
        model=directory,
    )


def read_parameters(
    directory: Path,
    layout: ParameterLayout,
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
    flat = torch.zeros(layout.width, dtype=dtype, device=device)
    places = {name: layout.view(flat, name) for name in layout.entries}
    for name, parts in fused.items():
        if name in stored_as and parts[0] not in stored_as:
            places[name] = layout.fused(flat, parts)
            for part in parts:
                del places[part]
    by_file: dict[Path, list[str]] = {}
    for name in places:
        if name not in stored_as:
            raise CheckpointIncompatibleError(f"{directory} lacks tensor {name}", tensor=name)
        by_file.setdefault(files[stored_as[name]], []).append(name)
    for file, names in by_file.items():
        header = read_header_of(file)
        # Not mapped: pages of a mapped file count as memory of the process, and would double it.
        with file.open("rb", buffering=0) as weights:
            for name in names:
                place, entry = places[name], header.get(stored_as[name])
                if entry is None:
                    # The index of a sharded checkpoint promises what the file does not hold.
                    raise CheckpointIncompatibleError(f"{file} lacks tensor {name}", tensor=name)
                shape = list(entry.shape)
                if name in fused and len(shape) == place.dim() + 1:
                    shape[:2] = [shape[0] * shape[1]]
                if shape != list(place.shape):
                    raise CheckpointIncompatibleError(
                        f"tensor {name} of {file} has shape {shape}, "
                        f"the configuration says {list(place.shape)}",
                        tensor=name,
                    )
                _read_numbers(weights, file, entry, place.view(-1))
    return flat


def _read_numbers(weights: IO[bytes], file: Path, entry: TensorEntry, place_N: Tensor) -> None:
    """Read a tensor of a safetensors file into its place, converted piece by piece."""
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointIncompatibleError(
            f"{file} holds tensors of dtype {entry.dtype}; convert them to one of "
            f"{', '.join(_DTYPES)}",
            dtype=entry.dtype,
        )
    weights.seek(entry.file_offset)
    is_direct = dtype == place_N.dtype and place_N.device.type == "cpu"
    buffer_N = None if is_direct else torch.empty(min(_CHUNK_NUMBERS, len(place_N)), dtype=dtype)
    for start in range(0, len(place_N), _CHUNK_NUMBERS):
        part_N = place_N[start : start + _CHUNK_NUMBERS]
        read_N = part_N if buffer_N is None else buffer_N[: len(part_N)]
        _read_into(weights, file, read_N.view(torch.uint8).numpy().data)
        if buffer_N is not None:
            part_N.copy_(read_N)


def _read_into(weights: IO[bytes], file: Path, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = weights.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointIncompatibleError(
                f"{file} ends before its last tensor; fetch it again", file=file
            )
        done += count
