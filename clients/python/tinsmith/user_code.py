"""Code of the user's own, named in one word: `FILE.py:NAME` or `MODULE:NAME`.

It is imported into this process, with its neighbours. A file is imported once, so that two settings
that name it share it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigurationError


def names_code(word: str) -> bool:
    """Whether a word has the form of code: `FILE.py:NAME` or `MODULE:NAME`."""
    return ":" in word and "://" not in word


def load_object(path: str, setting: str) -> Any:
    """Return what `FILE.py:NAME` or `MODULE:NAME` names.

    Args:
        path: Where it is; a file is read from the current folder on.
        setting: Name of the setting, for messages.

    Raises:
        ConfigurationError: If there is no such file, module or name, or importing it fails.
    """
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ConfigurationError(
            f"{setting} is {path!r}", remedy="write FILE.py:NAME, or MODULE:NAME"
        )
    module = import_place(place, f"{setting}: ")
    if not hasattr(module, name):
        raise ConfigurationError(f"{setting}: {place} has no {name}", remedy="correct the name")
    return getattr(module, name)


def import_place(place: str, prefix: str = "") -> Any:
    """Return the module of a file, `FILE.py`, or of a name.

    Args:
        place: Either.
        prefix: Begins the message of a failure.

    Raises:
        ConfigurationError: If there is no such file or module, or importing it fails.
    """
    try:
        if place.endswith(".py"):
            return _import_file(Path(place))
        # A console script does not look into the folder that it is called in.
        _look_into(Path.cwd())
        return importlib.import_module(place)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{prefix}{place} cannot be imported: {type(error).__name__}: {error}",
            remedy="run it by itself to see where it fails",
        ) from error


def _look_into(folder: Path) -> None:
    """Look for modules in a folder too, behind all others; imports may come later as well."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_file(file: Path) -> Any:
    path = file.expanduser().resolve()
    if not path.is_file():
        raise ConfigurationError(f"{file} is not there", remedy="check the path")
    # Two files of one name are two modules, and pickling finds either again.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{file} is no Python file", remedy="check the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # A file may import its neighbours, which come first, as when it is run by itself.
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
        _look_into(path.parent)
    except BaseException:
        del sys.modules[name]
        raise
    return module
