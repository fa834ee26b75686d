"""A full-parameter checkpoint as a Hugging Face directory, to be served as a base model."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import unquote, urlparse

from tinsmith_engine.files.weight_files import MODEL_FILE
from tinsmith_runtime import storage
from tinsmith_runtime.errors import CheckpointIncompatibleError
from tinsmith_runtime.storage.checkpoint_manifests import read_checkpoint

_SKIPPED_SUFFIXES = (".safetensors", ".bin", ".index.json")


def export_model(manifest_uri: str, base_directory: Path, target: Path) -> Path:
    """Write a directory with the files of a base model and the weights of a checkpoint.

    Args:
        manifest_uri: Of a checkpoint of a full-parameter run, in a file store of this machine.
        base_directory: The base model that the run began from.
        target: Created; its files are replaced.

    Raises:
        CheckpointIncompatibleError: If the checkpoint holds an adapter.
        CheckpointCorruptError: If its files are damaged.
    """
    manifest_path = Path(unquote(urlparse(manifest_uri).path))
    store = storage.open(f"file://{manifest_path.parent.parent}")
    _, files = read_checkpoint(store, manifest_path.parent.name)
    if MODEL_FILE not in files:
        raise CheckpointIncompatibleError(
            f"checkpoint {manifest_uri} holds an adapter, not a whole model; load it with PEFT"
        )
    target.mkdir(parents=True, exist_ok=True)
    for source in base_directory.iterdir():
        is_weights = source.name.endswith(_SKIPPED_SUFFIXES)
        if source.is_file() and not is_weights and not source.name.startswith("."):
            shutil.copyfile(source, target / source.name)
    (target / MODEL_FILE).write_bytes(files[MODEL_FILE])
    return target
