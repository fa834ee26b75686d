"""The reference of the Python SDK: signatures and docstrings of what is public."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import tinsmith
from tinsmith.field_docstrings import field_docstrings

_INTRO = """# Python SDK

Generated from the code. `import tinsmith` offers the names of the first pages; the last ones are
modules of their own. Every call has two forms, `x()` for plain code and `x_async()` for asyncio;
the second is listed by its name alone.

| page | holds |
| --- | --- |
"""
# Page, what it holds, and the modules whose public names are on it.
_PAGES = (
    ("client", "The connection, and what it creates", ("client", "settings")),
    ("training", "Runs, and losses of your own", ("training",)),
    ("sampling", "Samplers and streams", ("sampling", "text")),
    ("values", "What is sent and what comes back", ("types", "images")),
    ("futures", "Results that are on their way", ("rpc",)),
    ("resources", "Lists of a project: runs, checkpoints, keys, jobs, usage", ()),
    ("environments", "Environments on the server", ("environments",)),
    ("episodes", "Episodes of remote agents", ("episodes",)),
    ("errors", "The tree of errors", ("errors",)),
)
_MODULES = (
    ("rollouts", "tinsmith.rollouts", "Trajectories, groups and advantages"),
    ("matches", "tinsmith.matches", "Several agents that learn side by side"),
    ("driver", "tinsmith.driver", "A loop that is the driver of a job"),
)
# Attributes of `Client`, by their class.
_RESOURCES = (
    "runs",
    "checkpoints",
    "keys",
    "jobs",
    "sessions",
    "audit",
    "usage",
    "rollouts",
    "matches",
)
# First arguments of constructors that only the SDK calls.
_INSIDE = {"core", "background", "args", "held"}
_SECTION = re.compile(r"(?m)^(Args|Returns|Yields|Raises|Attributes|Example|Examples|Note):\n")
_ENTRY = re.compile(r"(?m)^    (\*{0,2}[\w.]+(?: \(.*?\))?): ")
# The default of a callable is shown with its address.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def pages() -> Mapping[str, str]:
    """Return the pages by their names below the folder of references."""
    found = {}
    rows = []
    values = {name: getattr(tinsmith, name) for name in sorted(tinsmith.__all__)}
    for page, about, folders in _PAGES:
        names = {
            name: value
            for name, value in values.items()
            if getattr(value, "__module__", "").partition(".")[2].partition(".")[0] in folders
        }
        text = f"# {page.capitalize()}\n\n{about}.\n\n" + _described("tinsmith", names)
        if page == "resources":
            text += _described("tinsmith", dict(_resources()))
        found[f"sdk/{page}.md"] = text
        rows.append(f"| [{page}]({page}.md) | {about} |\n")
    for page, module_name, about in _MODULES:
        module = importlib.import_module(module_name)
        names = {name: getattr(module, name) for name in _public(module)}
        found[f"sdk/{page}.md"] = f"# {module_name}\n\n{about}.\n\n" + _described(
            module_name, names
        )
        rows.append(f"| [{module_name}]({page}.md) | {about} |\n")
    return {"sdk/index.md": _INTRO + "".join(rows), **found}


def _public(module: ModuleType) -> list[str]:
    return sorted(module.__all__)


def _resources() -> Iterator[tuple[str, Any]]:
    """Yield the classes of the client's attributes, under the names by which they are reached."""
    annotations = inspect.get_annotations(tinsmith.Client)
    source = inspect.getsource(tinsmith.Client)
    for name in _RESOURCES:
        found = re.search(rf"self\.{name} = (\w+)\(", source)
        assert found is not None, f"Client.{name} is not there any more"
        module = importlib.import_module(tinsmith.Client.__module__)
        yield f"Client.{name}", annotations.get(name) or getattr(module, found.group(1))


def _described(prefix: str, names: Mapping[str, Any]) -> str:
    return "\n".join(line for name, value in names.items() for line in _name(prefix, name, value))


def _name(prefix: str, name: str, value: Any) -> Iterator[str]:
    yield f"## {name}\n"
    if inspect.isclass(value):
        if value.__name__ != name and hasattr(tinsmith, value.__name__):
            yield f"Another name of [{value.__name__}](#{value.__name__.lower()}).\n"
            return
        yield from _class(name if "." in name else f"{prefix}.{name}", value)
    elif inspect.isroutine(value):
        yield _signature(f"{prefix}.{name}", value)
        yield _docstring(inspect.getdoc(value))
    else:
        yield f"`{prefix}.{name} = {value!r}`\n"


def _class(name: str, value: type[Any]) -> Iterator[str]:
    if dataclasses.is_dataclass(value):
        sentences = field_docstrings(value)
        yield _docstring(inspect.getdoc(value))
        yield "| field | type | default | meaning |\n| --- | --- | --- | --- |"
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                about = " ".join(sentences.get(field.name, "").split())
                cells = (f"`{field.name}`", f"`{field.type}`", _default(field), about)
                escaped = (cell.replace("|", "\\|") for cell in cells)
                yield f"| {' | '.join(escaped)} |"
        yield ""
    else:
        if _is_made_by_users(value):
            yield _signature(name, value.__init__)
        yield _docstring(inspect.getdoc(value))
    own = [each for each in value.__mro__ if each.__module__.startswith("tinsmith")]
    members = {key: member for each in reversed(own) for key, member in vars(each).items()}
    for key, member in sorted(members.items()):
        if not key.startswith("_") and not (key.endswith("_async") and key[:-6] in members):
            yield from _member(key, member, f"{key}_async" in members)


def _is_made_by_users(value: type[Any]) -> bool:
    """Return whether its constructor is for programs: that of others takes what a client shares."""
    if not inspect.isfunction(value.__init__):
        return False
    names = list(inspect.signature(value).parameters)
    return bool(names) and names[0] not in _INSIDE


def _member(key: str, member: object, has_async: bool) -> Iterator[str]:
    if isinstance(member, property):
        yield f"### {key}\n\n{_docstring(inspect.getdoc(member))}"
        return
    function = getattr(member, "__func__", member)
    if inspect.isfunction(function):
        yield f"### {key}\n"
        yield _signature(key, function)
        yield _docstring(inspect.getdoc(function))
        if has_async:
            yield f"In asyncio: `await {key}_async(...)`.\n"


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    kept = [
        each.replace(annotation=_Annotation(each.annotation))
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    returned = signature.return_annotation
    end = "" if returned in (signature.empty, "None") else f" -> {_Annotation(returned)!r}"
    text = ", ".join(str(each) for each in _with_star(kept))
    if len(name + text + end) > 80:
        text = "\n    " + ",\n    ".join(str(each) for each in _with_star(kept)) + ",\n"
    return f"```text\n{_ADDRESS.sub('', f'{name}({text}){end}')}\n```\n"


class _Annotation:
    """An annotation that is shown as it stands in the code: without the quotes of a string."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return (
            self._value if isinstance(self._value, str) else inspect.formatannotation(self._value)
        )


def _with_star(parameters: list[inspect.Parameter]) -> Iterator[object]:
    """Yield the parameters, with a star before the first that is given by its name."""
    seen = False
    for each in parameters:
        seen = seen or each.kind is each.VAR_POSITIONAL
        if each.kind is each.KEYWORD_ONLY and not seen:
            yield "*"
            seen = True
        yield each


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "" if field.default_factory is dataclasses.MISSING else "`...`"


def _docstring(text: str | None) -> str:
    """Return a docstring of Google's form as Markdown."""
    if not text:
        return ""
    parts = _SECTION.split(inspect.cleandoc(text))
    lines = [parts[0].strip(), ""]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title.startswith("Example"):
            lines += [f"**{title}**", "", "```pycon", inspect.cleandoc(body).strip(), "```", ""]
        else:
            lines += [f"**{title}**", "", *_entries(body), ""]
    return "\n".join(lines)


def _entries(body: str) -> Iterator[str]:
    parts = _ENTRY.split(body.rstrip())
    if parts[0].strip():
        yield " ".join(parts[0].split())
    for name, meaning in zip(parts[1::2], parts[2::2], strict=True):
        yield f"- `{name}`: {' '.join(meaning.split())}"
