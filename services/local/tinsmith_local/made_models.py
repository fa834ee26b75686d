"""Models with random weights that are made on the spot, by the names that `up` knows them by.

What makes them is imported once it is wanted: it loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

TINY = "tiny"


def _tiny(directory: Path) -> Path:
    from tinsmith_local.tiny_model import build_tiny_model

    return build_tiny_model(directory)


def _two_layers(directory: Path) -> Path:
    from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model

    config = TinyModelConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_key_value_heads=2,
        intermediate_size=192,
        initializer_range=0.125,
    )
    return build_tiny_model(directory, config=config)


def _vision(directory: Path) -> Path:
    from tinsmith_local.tiny_vision_model import build_tiny_vision_model

    return build_tiny_vision_model(directory)


MADE_MODELS: Mapping[str, Callable[[Path], Path]] = {
    TINY: _tiny,
    "tiny-2x64": _two_layers,
    "tiny-vl": _vision,
}
"""What writes each of them into a directory, unless it is there and complete."""


def make_model(name: str, data_dir: Path) -> Path:
    """Return the directory of a model, made below `data_dir` if it is not there.

    Raises:
        KeyError: If there is no such model.
    """
    return MADE_MODELS[name](data_dir / "models" / name)
