"""The few pictures of `docs/page`: chosen of all, in few colours, so that they stay small."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

KEPT = (
    "runs",
    "runs-dark",
    "runs-narrow",
    "run",
    "queue",
    "match",
    "episode",
    "failed-run-alone",
    "empty-runs",
)
MAX_BYTES = 150_000
_NUM_COLOURS = 128


def keep(pictures: Path, folder: Path) -> None:
    """Write the kept ones of some pictures into a folder.

    Raises:
        ValueError: If one is larger than a picture may be in the repository.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        source = pictures / f"{name}.png"
        if not source.exists():
            continue
        path = folder / source.name
        with Image.open(source) as picture:
            picture.convert("RGB").quantize(_NUM_COLOURS).save(path, optimize=True)
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, more than {MAX_BYTES}")
