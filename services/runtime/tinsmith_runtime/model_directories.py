"""What a base model is given by: a directory, or a hub id."""

from __future__ import annotations

from pathlib import Path

from tinsmith_runtime.errors import ModelNotFoundError


def model_directory(source: str | Path) -> Path | None:
    """Return the directory that a base model is given by; None if it is given by a hub id.

    Raises:
        ModelNotFoundError: Neither a directory with a config.json nor what a hub id looks like.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"directory {path} holds no config.json, so it is no model; give one that does",
                model=path,
            )
        return path
    # A hub id is `name` or `owner/name`; everything else was meant as a path.
    if path.is_absolute() or str(source).startswith(".") or len(path.parts) > 2:
        raise ModelNotFoundError(
            f"there is no model directory {source}; check the path", model=source
        )
    return None
