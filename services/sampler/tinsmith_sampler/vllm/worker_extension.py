"""What vLLM's workers are taught: to take all weights of a model from files."""

from __future__ import annotations

from typing import Any


class WeightsExtension:
    """Mixed into the worker class of vLLM, once for each device."""

    model_runner: Any

    def load_weights_of(self, directory: str) -> None:
        """Replace the weights of the model by those of a folder of safetensors."""
        self.model_runner.reload_weights(weights_path=directory)
