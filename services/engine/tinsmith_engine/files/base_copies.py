"""Whether tensors of files are the same: what decides if a head is the model's own.

transformers ties the unembedding to the embedding where the settings say so, unless the files hold
both with different numbers. PEFT saves the unembedding of the base model beside an adapter of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tinsmith_engine.files.hub_files import stored_tensors
from tinsmith_engine.files.weight_files import TensorEntry, read_header_of
from tinsmith_runtime.errors import CheckpointIncompatibleError

EMBEDDING, HEAD = "embed_tokens", "lm_head"
HEAD_WEIGHT = f"{HEAD}.weight"
_ROWS = 4096
"""Rows that are compared at a time, so that no whole tensor is held."""
ADVICE = (
    "a run trains adapters of layers and none of their weights; merge the adapter into its base "
    "with PEFT's merge_and_unload() and serve what comes out as a base model"
)
"""What to do with an adapter that brings more than adapters."""


def holds_another_head(directory: Path) -> bool:
    """Return whether the files hold an unembedding that differs from the embedding.

    Raises:
        ModelNotFoundError: If the directory has no safetensors weights that may be read.
    """
    files = stored_tensors(directory)
    embedding = _embedding_in(files)
    if HEAD_WEIGHT not in files or embedding is None:
        return False
    return not _is_same((files[HEAD_WEIGHT], HEAD_WEIGHT), (files[embedding], embedding))


def is_copy_name(name: str) -> bool:
    """Return whether a tensor of an adapter is named as a layer's own weight that PEFT copied."""
    module = name.removesuffix(".weight").removesuffix(".base_layer")
    return name.endswith(".weight") and module.rsplit(".", 1)[-1] in (EMBEDDING, HEAD)


def check_copies(path: Path, header: Mapping[str, TensorEntry], directory: Path) -> None:
    """Refuse an adapter that brings an embedding or unembedding other than the base model's.

    Args:
        path: The adapter's weights.
        header: Their tensors.
        directory: Of the base model.

    Raises:
        CheckpointIncompatibleError: If there is one; it is named.
    """
    files = stored_tensors(directory)
    for name in filter(is_copy_name, header):
        module = name.removesuffix(".weight").removesuffix(".base_layer").rsplit(".", 1)[-1]
        is_own_head = module == HEAD and HEAD_WEIGHT in files
        stored = HEAD_WEIGHT if is_own_head else _embedding_in(files)
        if stored is None or not _is_same((path, name), (files[stored], stored)):
            raise CheckpointIncompatibleError(
                f"tensor {name} is not the {module} of the base model; {ADVICE}", tensor=name
            )


def _embedding_in(files: Mapping[str, Path]) -> str | None:
    return next((name for name in files if name.endswith(f"{EMBEDDING}.weight")), None)


def _is_same(one: tuple[Path, str], other: tuple[Path, str]) -> bool:
    """Return whether two tensors are equal, each in the dtype of the first."""
    if read_header_of(one[0])[one[1]].shape != read_header_of(other[0])[other[1]].shape:
        return False
    with safe_open(one[0], framework="pt") as left, safe_open(other[0], framework="pt") as right:
        rows, others = _slice(left, one[1]), _slice(right, other[1])
        for start in range(0, rows.get_shape()[0], _ROWS):
            part = rows[start : start + _ROWS]
            if not bool((part == others[start : start + _ROWS].to(part.dtype)).all()):
                return False
    return True


def _slice(stored: Any, name: str) -> Any:
    return stored.get_slice(name)
