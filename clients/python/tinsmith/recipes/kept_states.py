"""What belongs to a run beside its weights, in step with the run's saves.

A run goes on from its last save, and that may be one before the last state written here: the
weights are saved behind it. So the states of the last two saves are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.experiment.experiment import OPPONENTS_FILE
from tinsmith.recipes.experiment.json_files import write_json


class KeptStates:
    """States by step, in a file of the experiment's folder.

    Args:
        folder: Of the experiment.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / OPPONENTS_FILE

    def write(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Keep a state, which says its `step`, and the one of the save before it.

        Returns:
            The states that are kept no longer.
        """
        known = [kept for kept in self._read_all() if kept["step"] != state["step"]]
        earlier = [kept for kept in known if kept["step"] < state["step"]][-1:]
        write_json(self._path, [*earlier, dict(state)])
        return [kept for kept in known if kept not in earlier]

    def read(self, step: int) -> dict[str, Any]:
        """Return the state after a step.

        Raises:
            ConfigurationError: If there is none.
        """
        for kept in self._read_all():
            if kept["step"] == step:
                return kept
        raise ConfigurationError(
            f"{self._path} does not say what plays after step {step}",
            remedy="begin anew with --overwrite, or choose another folder with output_dir=...",
        )

    def _read_all(self) -> list[dict[str, Any]]:
        try:
            kept: list[dict[str, Any]] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return kept
