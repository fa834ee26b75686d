"""The public names, signatures and fields of the SDK are frozen in `public_api.txt`.

A difference is either a mistake or a change that users notice. `make sdk` renews the file, and its
difference is reviewed with the change.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import tinsmith

FROZEN = Path(__file__).parent / "public_api.txt"
MAKERS = {"__init__", "__new__"}


def described() -> str:
    """Return a line for each public name, and for each public member of a class."""
    lines = []
    for name in sorted(tinsmith.__all__):
        value = getattr(tinsmith, name)
        if inspect.isclass(value):
            lines += _class(name, value)
        elif inspect.isfunction(value):
            lines.append(f"{name}{inspect.signature(value)}")
        else:
            lines.append(name)
    # The default of a callable is shown with its address, which differs between processes.
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join([*lines, ""]))


def _class(name: str, value: type) -> list[str]:
    bases = [base.__name__ for base in value.__mro__[1:-1] if base.__module__ == "builtins"]
    lines = [f"class {name}({', '.join(bases)})" if bases else f"class {name}"]
    if dataclasses.is_dataclass(value):
        lines += [f"  {f.name}: {f.type}{_default(f)}" for f in dataclasses.fields(value)]
    own = [each for each in value.__mro__ if each.__module__.startswith("tinsmith")]
    members = {key: member for each in reversed(own) for key, member in vars(each).items()}
    for key, member in sorted(members.items()):
        if (key in MAKERS and not dataclasses.is_dataclass(value)) or not key.startswith("_"):
            lines += _member(key, member)
    return lines


def _member(key: str, member: object) -> list[str]:
    if isinstance(member, property) and member.fget is not None:
        return [f"  {key} -> {inspect.signature(member.fget).return_annotation}"]
    function = getattr(member, "__func__", member)
    if not inspect.isfunction(function):
        return []
    kind = "async " if inspect.iscoroutinefunction(function) else ""
    return [f"  {kind}{key}{inspect.signature(function)}"]


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    return " = ..." if field.default_factory is not dataclasses.MISSING else ""


def test_the_public_face_is_the_frozen_one() -> None:
    assert described() == FROZEN.read_text(), "run `make sdk` if users are to notice this"


if __name__ == "__main__":
    sys.exit(FROZEN.write_text(described()) < 0)
