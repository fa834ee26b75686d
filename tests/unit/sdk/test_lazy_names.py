"""`import tinsmith` loads its names at their first use, and offers all of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tinsmith
import tinsmith.public


def test_every_public_name_is_there() -> None:
    assert tinsmith.__all__ == tinsmith.public.__all__
    assert all(getattr(tinsmith, n) is getattr(tinsmith.public, n) for n in tinsmith.__all__)
    assert set(tinsmith.__all__) <= set(dir(tinsmith))


def test_a_module_is_found_by_its_name() -> None:
    probe = "import tinsmith; print(tinsmith.names.ProjectName, tinsmith.errors.TinsmithError)"
    subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, timeout=60)


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="'tinsmith' has no attribute 'Trainer'"):
        _ = tinsmith.Trainer
