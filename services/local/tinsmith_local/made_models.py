"""Models with random weights that are made on the spot, by the names that `up` knows them by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model
from tinsmith_local.tiny_vision_model import build_tiny_vision_model

TINY = "tiny"

_TWO_LAYERS = TinyModelConfig(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_key_value_heads=2,
    intermediate_size=192,
    initializer_range=0.125,
)

MADE_MODELS: Mapping[str, Callable[[Path], Path]] = {
    TINY: build_tiny_model,
    "tiny-2x64": partial(build_tiny_model, config=_TWO_LAYERS),
    "tiny-vl": build_tiny_vision_model,
}
"""What writes each of them into a directory, unless it is there and complete."""


def make_model(name: str, data_dir: Path) -> Path:
    """Return the directory of a model, made below `data_dir` if it is not there.

    Raises:
        KeyError: If there is no such model.
    """
    return MADE_MODELS[name](data_dir / "models" / name)
