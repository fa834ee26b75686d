"""Tinsmith: write the training loop, the server runs the model.

The names of `tinsmith.public` are loaded at their first use. A program that takes a light module
alone does not pay for grpc and numpy: the workers of environments import no more than their API.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinsmith.public import *  # noqa: F403
    from tinsmith.public import __all__ as __all__
    from tinsmith.public import __version__ as __version__

_DUNDERS = ("__all__", "__version__")


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name not in _DUNDERS:
        raise AttributeError(f"module 'tinsmith' has no attribute {name!r}")
    if importlib.util.find_spec(f"tinsmith.{name}") is not None:
        return importlib.import_module(f"tinsmith.{name}")
    public = importlib.import_module("tinsmith.public")
    if name != "__all__" and name not in public.__all__:
        raise AttributeError(f"module 'tinsmith' has no attribute {name!r}")
    return getattr(public, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
