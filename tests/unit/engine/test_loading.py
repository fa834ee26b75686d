"""Models that cannot be loaded say why."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tinsmith_engine.files.hub_files import stored_tensors
from tinsmith_local.tiny_model import build_tiny_model
from tinsmith_runtime.errors import ModelNotFoundError


def test_weights_that_may_not_be_read_are_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny_model(tmp_path / "model")
    # Root may read everything.
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    with pytest.raises(ModelNotFoundError, match="cannot be read by user"):
        stored_tensors(model)


def test_a_folder_that_may_not_be_entered_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)

    with pytest.raises(ModelNotFoundError, match="cannot be read by user"):
        stored_tensors(tmp_path)


def test_a_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no model\.safetensors"):
        stored_tensors(tmp_path)
