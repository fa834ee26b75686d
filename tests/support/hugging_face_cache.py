"""A cache of Hugging Face in which a model lies as if it had been downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

_REVISION = "0" * 40


def fill_cache(hub: Path, model_name: str, model_dir: Path) -> None:
    """Lay out a model under the name that it is served with."""
    repository = hub / f"models--{model_name.replace('/', '--')}"
    shutil.copytree(model_dir, repository / "snapshots" / _REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(_REVISION)
