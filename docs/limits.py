"""Writes limits.md: every bound of what a caller can make grow, with its default and its error.

Values are read from the code. A setting or constant whose name says that it is a bound (`max_...`,
`MAX_...`) must be in limits.toml, as one of callers or as one of the inside.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.variables import PODS

import tinsmith.errors
from tinsmith_runtime import errors
from tinsmith_runtime.pod.settings_help import Setting, settings_of
from tinsmith_runtime.rpc.server import ServerConfig

PAGE = Path(__file__).parent / "limits.md"
_LISTED = tomllib.loads((Path(__file__).parent / "limits.toml").read_text())
SERVICES = Path(__file__).parents[1] / "services"
CLIENT = Path(__file__).parents[1] / "clients/python/tinsmith"
_PREFIX = "TINSMITH_"
_HEAD = """# Limits

Generated from the code by `make docs`: what a caller can make grow, how far, what sets the bound,
and what happens beyond it. A word in capitals is the reason of an error. Errors of the code
`RESOURCE_EXHAUSTED` say with `RetryInfo` whether the same request may succeed later; HTTP answers
429 then, else 400. Other words say what is done. Times are seconds, sizes bytes. A bound that is
set by no variable is a constant of the file that is named; `x/y.py` is
`services/x/tinsmith_x/y.py`, and `client/y.py` is `clients/python/tinsmith/y.py`.

A bound is *of whom* it counts together. `project` counts all keys of a project, however many.
`address` and `connection` count callers that have shown no good key, or all. `all` is shared by
all projects of a pod. `process` is of one process below the pod. `one` is of one request, message,
file or resource, whatever else there is. No bound is of a key: a project has any number of them.
"""
_ACTS = frozenset(
    {"waits", "drops", "forgets", "ends", "asks anew", "cuts", "parks", "starts anew", "HTTP 408"}
    | {"HTTP 431", "RetryInfo"}
)
WHOM = frozenset({"one", "connection", "address", "project", "process", "all"})
"""Of whom a bound may be."""
_IS_BOUND = re.compile(r"_?MAX_[A-Z0-9_]+")
_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Tuple, ast.expr_context)
_POWERS = ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki"))


def page() -> str:
    """Return the text of the page.

    Raises:
        ValueError: If a bound is not listed, or what is listed does not exist.
    """
    lines = [_HEAD]
    for pod, config_class in PODS.items():
        rows = list(_rows_of(pod, config_class))
        if rows:
            lines += [f"## {pod.capitalize()}\n", _TITLES, _RULE, *rows, ""]
    lines += ["## Every server of gRPC\n", _TITLES, _RULE, *_rows_of_servers(), ""]
    shared = [pod for pod in _LISTED["constants"] if pod not in PODS]
    for pod in shared:
        lines += [f"## {pod.capitalize()}, of every pod\n", _TITLES, _RULE]
        lines += [*_rows_of_constants(pod), ""]
    lines += [_MEASURED, *_rows_measured(), ""]
    _check_complete()
    return "\n".join(lines).rstrip() + "\n"


_MEASURED = """## Time of others, measured

What a request of another project took, in seconds, while one project used a bound up: alone, and at
worst beside it. And by how many MiB the server's memory grew. `tinsmith up` with a tiny model on
two cores of a CPU, beside other load. Elsewhere the figures differ; that others wait for a second
at most is what these bounds are for.

| bound | what one project does | what another asks for | alone | beside it | memory |
| --- | --- | --- | --- | --- | --- |"""

_TITLES = "| what | default | of whom | set by | beyond it |"
_RULE = "| --- | --- | --- | --- | --- |"


def _rows_of(pod: str, config_class: type[Any]) -> Iterator[str]:
    found = {_field_of(setting): setting for setting in settings_of(config_class)}
    for name, (beyond, whom) in _LISTED["settings"].get(pod, {}).items():
        if name not in found:
            raise ValueError(f"docs/limits.toml lists {pod}.{name}, which is no setting")
        setting = found[name]
        value = _shown(name, _default_of(config_class, name))
        yield _row(setting.meaning, value, f"`{setting.variable}`", beyond, whom)
    yield from _rows_of_constants(pod)


def _rows_of_servers() -> Iterator[str]:
    meanings = {_field_of(setting): setting.meaning for setting in settings_of(ServerConfig)}
    for name, (beyond, whom) in _LISTED["server"].items():
        yield _row(meanings[name], _shown(name, _default_of(ServerConfig, name)), "", beyond, whom)


def _rows_of_constants(pod: str) -> Iterator[str]:
    for place, (meaning, beyond, whom) in _LISTED["constants"].get(pod, {}).items():
        path, name = place.split(":")
        values = dict(_constants_in(_root_of(pod) / path))
        if name not in values:
            raise ValueError(f"docs/limits.toml lists {pod}/{place}, which is no constant")
        yield _row(meaning, _shown(name, values[name]), f"`{pod}/{path}`", beyond, whom)


def _rows_measured() -> Iterator[str]:
    for place, done, asked, alone_s, beside_s, memory_mib in _LISTED["measured"]["rows"]:
        pod, path = place.split("/", 1)
        if path not in _LISTED["constants"].get(pod, {}):
            raise ValueError(f"docs/limits.toml has a time of {place}, which is no bound there")
        name, grown = place.split(":")[1], f"{memory_mib:,}" if memory_mib >= 0 else ""
        yield f"| `{name}` | {done} | {asked} | {alone_s:g} | {beside_s:g} | {grown} |"


def _root_of(pod: str) -> Path:
    return CLIENT if pod == "client" else SERVICES / pod / f"tinsmith_{pod}"


def _row(meaning: str, value: str, setting: str, beyond: str, whom: str) -> str:
    if whom not in WHOM:
        raise ValueError(
            f"docs/limits.toml: a bound is of {', '.join(sorted(WHOM))}, not of {whom!r}"
        )
    if beyond not in _ACTS and beyond not in _reasons():
        raise ValueError(f"docs/limits.toml: {beyond} is no reason of an error")
    shown = meaning.replace("|", chr(92) + "|")
    return f"| {shown} | {value} | {whom} | {setting} | {beyond} |"


def _check_complete() -> None:
    for pod, config_class in PODS.items():
        known = _LISTED["settings"].get(pod, {}).keys() | set(_LISTED["inner"]["settings"])
        for setting in settings_of(config_class):
            if _field_of(setting).startswith("max_") and _field_of(setting) not in known:
                raise ValueError(f"docs/limits.toml does not say what is beyond {setting.variable}")
    listed = {f"{pod}/{place}" for pod, places in _LISTED["constants"].items() for place in places}
    exist = set()
    for pod in sorted(path.name for path in SERVICES.iterdir() if path.is_dir()):
        root = _root_of(pod)
        for path in sorted(root.rglob("*.py")):
            exist |= {
                f"{pod}/{path.relative_to(root)}:{name}"
                for name, _ in _constants_in(path)
                if _IS_BOUND.fullmatch(name)
            }
    for place in sorted(exist - listed - set(_LISTED["inner"]["constants"])):
        raise ValueError(f"docs/limits.toml does not list the bound {place}")
    for place in sorted(set(_LISTED["inner"]["constants"]) - exist):
        raise ValueError(f"docs/limits.toml lists {place}, which is no constant")


def _constants_in(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the constants of a module that are numbers, without importing it."""
    for node in ast.parse(path.read_text()).body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            value = _number(getattr(node, "value", None))
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = value if isinstance(value, tuple) else (value,) * len(names)
            for name, each in zip(names, values, strict=False):
                if isinstance(name, ast.Name) and each is not None:
                    yield name.id, each


def _number(node: ast.expr | None) -> Any:
    if node is None:
        return None
    for part in ast.walk(node):
        is_number = isinstance(part, ast.Constant) and isinstance(part.value, int | float)
        if not (is_number or isinstance(part, _ARITHMETIC)):
            return None
    # Numbers and arithmetic alone.
    return eval(compile(ast.Expression(node), "constant", "eval"), {"__builtins__": {}})


def _default_of(config_class: type[Any], name: str) -> Any:
    return next(each.default for each in dataclasses.fields(config_class) if each.name == name)


def _field_of(setting: Setting) -> str:
    return setting.variable.removeprefix(_PREFIX).lower()


def _shown(name: str, value: Any) -> str:
    if "bytes" in name.lower():
        for power, unit in _POWERS:
            if value >= power and value % power == 0:
                return f"{value // power} {unit}"
    return f"{value:,}".removesuffix(".0")


def _reasons() -> set[str]:
    return {
        reason
        for module in (errors, tinsmith.errors)
        for each in vars(module).values()
        if isinstance(each, type) and (reason := getattr(each, "reason", ""))
    }
