"""The samples of jobs that are scenarios, shortened to a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

SAMPLES = sorted((Path(__file__).parents[2] / "k8s" / "samples").glob("scenario-*.yaml"))
STEPS = 3
"""The first of which imitates."""
_ALL = {"num_imitation_steps": 1, "num_validation": 2, "eval_every": 0}
_SMALL: dict[str, dict[str, int]] = {
    "rl": {"num_demonstrations": 2, "num_problems": 1, "group_size": 2},
    "self_play": {"num_games": 2},
    "match": {"num_games": 2, "num_practice_steps": 1},
}


def shortened(sample: Path) -> dict[str, Any]:
    """Return the manifest of a sample with few steps, each of few plays."""
    manifest: dict[str, Any] = yaml.safe_load(sample.read_text())
    method = manifest["spec"]["method"]
    method["maxSteps"] = STEPS
    method["parameters"] |= _ALL | _SMALL[method["type"]]
    return manifest
