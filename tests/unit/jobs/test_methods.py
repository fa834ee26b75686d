"""What a job may do is listed once for each side, and the lists agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinsmith.driver.methods import read_method
from tinsmith.jobs.methods import RECIPE_METHODS
from tinsmith_jobs.spec import Method

ROOT = Path(__file__).parents[3]
KINDS = {method.value for method in Method}


def test_the_schema_takes_the_methods_of_the_code() -> None:
    crd: Any = yaml.safe_load((ROOT / "k8s/crd/trainingjobs.tinsmith.dev.yaml").read_text())
    [version] = crd["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert set(spec["properties"]["method"]["properties"]["type"]["enum"]) == KINDS


def test_every_method_but_two_is_a_recipe() -> None:
    assert {"custom", "serve"} == KINDS - RECIPE_METHODS


@pytest.mark.parametrize("kind", sorted(RECIPE_METHODS))
def test_the_driver_has_every_recipe(kind: str, tmp_path: Path) -> None:
    method = read_method(json.dumps({"type": kind, "model": "tiny"}), tmp_path)
    assert method.config.base_model == "tiny"
