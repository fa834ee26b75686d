"""The graph of a custom loss: read from JSON and checked, node by node, before it is accepted.

The form is that of the public `tinker` client, which records a function with `torch.fx`: nodes in
the order of execution, whose arguments are numbers, lists, and objects of one key for everything
else (`{"ref": "mul_1"}` for a node before). What is read here is data of this module's own classes;
every name in it has been found in the tables of `loss_operations`.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tinsmith_engine.base.types import CustomLoss
from tinsmith_engine.losses.loss_operations import (
    ALIASES,
    ATTRIBUTES,
    DTYPES,
    FUNCTIONS,
    KEYWORDS,
    METHODS,
    SWITCHES,
    TEXTS,
)
from tinsmith_runtime.errors import CustomLossRefusedError

MAX_GRAPH_BYTES = 256 * 1024
MAX_NODES = 512
MAX_INPUTS = 16
MAX_METRICS = 64
MAX_ENTRIES = 64
"""Of one list, tuple or set of arguments."""
MAX_DEPTH = 4
"""Of lists within lists."""
MAX_INTEGER = 2**63 - 1

LOGPROBS = "logprobs"

_FORMAT = 1
_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_FUNCTION_NAME_CHARACTERS = 128
_FIELDS = frozenset({"op", "name", "target", "args", "kwargs"})
_INFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of a node before."""

    node: str


@dataclass(frozen=True, slots=True)
class DtypeName:
    """A type of numbers."""

    name: str


@dataclass(frozen=True, slots=True)
class DeviceName:
    """Where tensors are: the CPU."""


@dataclass(frozen=True, slots=True)
class Call:
    """One node that computes something."""

    node: str
    target: str
    """Canonical name of a function, or the name of a method."""
    is_method: bool
    args: tuple[Any, ...]
    """Numbers, None, `Ref`, `DtypeName`, `DeviceName`, `...`, slices; lists and tuples of these."""
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LossGraph:
    """A custom loss, ready to be computed."""

    name: str
    inputs: tuple[str, ...]
    """Nodes that hold the arguments, in the order of `CustomLoss.inputs`."""
    calls: tuple[Call, ...]
    loss: str
    """The node that is the loss."""
    metrics: Mapping[str, str]
    """The node of each metric."""


@functools.lru_cache(maxsize=64)
def read_graph(custom: CustomLoss) -> LossGraph:
    """Return the graph of a custom loss.

    Raises:
        CustomLossRefusedError: It is not well formed, too large, or calls what is not allowed.
    """
    _check_inputs(custom)
    nodes = _nodes_of(custom.graph_json)
    reader = _Reader(custom)
    for node in nodes:
        reader.read(node)
    return reader.graph()


class _Reader:
    """Reads the nodes of a graph in order."""

    def __init__(self, custom: CustomLoss) -> None:
        self._custom = custom
        self._known: set[str] = set()
        self._inputs: list[str] = []
        self._calls: list[Call] = []
        self._output: Any = None
        self._has_output = False

    def read(self, node: Any) -> None:
        """Take the next node."""
        if not isinstance(node, dict) or not _FIELDS.issuperset(node):
            _refuse("", f"a node is an object with {', '.join(sorted(_FIELDS))}")
        name, target = node.get("name"), node.get("target")
        if not isinstance(name, str) or _NODE_NAME.fullmatch(name) is None:
            _refuse("", f"{name!r:.40} is not the name of a node")
        if not isinstance(target, str) or not isinstance(node.get("args", []), list):
            _refuse(name, "has a target, which is a text, and args, which are a list")
        if not isinstance(node.get("kwargs", {}), dict):
            _refuse(name, "has kwargs, which are an object")
        if name in self._known:
            _refuse(name, "is the name of two nodes")
        if self._has_output:
            _refuse(name, "comes after the output")
        match node.get("op"):
            case "placeholder":
                self._read_input(name, target, node)
            case "call_function" | "call_method":
                self._calls.append(self._read_call(name, target, node))
            case "output":
                self._read_output(name, node)
            case other:
                _refuse(name, f"has the op {other!r:.40}, which a custom loss cannot have")
        self._known.add(name)

    def graph(self) -> LossGraph:
        """Return what was read."""
        if not self._has_output:
            _refuse("", "has no output")
        if len(self._inputs) != len(self._custom.inputs):
            _refuse("", f"has {len(self._inputs)} placeholders, inputs names others")
        loss, metrics = self._output
        return LossGraph(
            name=self._custom.name,
            inputs=tuple(self._inputs),
            calls=tuple(self._calls),
            loss=loss,
            metrics=metrics,
        )

    def _read_input(self, name: str, target: str, node: Mapping[str, Any]) -> None:
        number = len(self._inputs)
        if self._calls or node.get("args") or node.get("kwargs"):
            _refuse(name, "is a placeholder, which come first and have no default")
        if number >= len(self._custom.inputs) or target != self._custom.inputs[number].name:
            _refuse(name, f"is for {target!r:.70}, which is not input {number} of the loss")
        self._inputs.append(name)

    def _read_call(self, name: str, target: str, node: Mapping[str, Any]) -> Call:
        is_method = node["op"] == "call_method"
        canonical = target if is_method else ALIASES.get(target, target)
        operation = (METHODS if is_method else FUNCTIONS).get(canonical)
        if operation is None:
            kind = "method" if is_method else "function"
            _refuse(name, f"calls the {kind} {target!r:.80}, which is not allowed")
        given = node.get("args", [])
        if len(given) > MAX_ENTRIES:
            _refuse(name, f"has {len(given)} arguments, at most {MAX_ENTRIES} may be")
        if canonical == "getattr":
            return self._read_attribute(name, given, node)
        args = tuple(self._argument(name, each) for each in given)
        if operation.max_args is not None and len(args) > operation.max_args:
            _refuse(name, f"has arguments of {target} that are to be named")
        kwargs = {}
        for key, value in node.get("kwargs", {}).items():
            if key in SWITCHES:
                if value is not SWITCHES[key] and value != SWITCHES[key]:
                    _refuse(name, f"gives {key!r:.40}, which is not allowed")
            elif key not in KEYWORDS:
                _refuse(name, f"gives {key!r:.40}, which is not allowed")
            elif isinstance(value, str) and value in TEXTS.get(key, ()):
                kwargs[key] = value
            else:
                kwargs[key] = self._argument(name, value)
        return Call(name, canonical, is_method, args, kwargs)

    def _read_attribute(self, name: str, given: Sequence[Any], node: Mapping[str, Any]) -> Call:
        if len(given) != 2 or node.get("kwargs") or not isinstance(given[1], str):
            _refuse(name, "reads an attribute, which takes a node and the name of the attribute")
        owner, attribute = self._argument(name, given[0]), given[1]
        if not isinstance(owner, Ref) or attribute not in ATTRIBUTES:
            _refuse(name, f"reads the attribute {attribute!r:.40}, which is not allowed")
        return Call(name, "getattr", False, (owner, attribute), {})

    def _read_output(self, name: str, node: Mapping[str, Any]) -> None:
        match node:
            case {"args": [{"tuple": [loss, {"dict": dict(metrics)}]}]}:
                pass
            case {"args": [[loss, {"dict": dict(metrics)}]]}:
                pass
            case _:
                _refuse(name, "is the output, which is (loss, metrics)")
        if node.get("kwargs"):
            _refuse(name, "is the output, which has one argument")
        if len(metrics) > MAX_METRICS:
            _refuse(name, f"has {len(metrics)} metrics, at most {MAX_METRICS} may be")
        found = {}
        for key, value in metrics.items():
            if _METRIC_NAME.fullmatch(key) is None:
                _refuse(
                    name, f"names a metric {key!r:.80}, which is not custom/<name>:sum or :mean"
                )
            found[key] = self._output_node(name, value)
        self._output = (self._output_node(name, loss), found)
        self._has_output = True

    def _output_node(self, name: str, value: Any) -> str:
        argument = self._argument(name, value)
        if not isinstance(argument, Ref):
            _refuse(name, "returns what no node computed")
        return argument.node

    def _argument(self, name: str, value: Any, depth: int = 0) -> Any:
        """Return an argument, which is of a closed set of classes."""
        if depth > MAX_DEPTH:
            _refuse(name, f"has lists within lists, more than {MAX_DEPTH}")
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            if abs(value) > MAX_INTEGER:
                _refuse(name, "has an integer of more than 64 bits")
            return value
        if isinstance(value, list):
            return [*self._entries(name, value, depth)]
        if not isinstance(value, dict) or len(value) != 1:
            _refuse(name, f"has the argument {value!r:.60}, which is not allowed")
        [(kind, content)] = value.items()
        match kind, content:
            case "ref", str(node):
                if node not in self._known:
                    _refuse(name, f"takes {node!r:.60}, which is no node before it")
                return Ref(node)
            case "tuple", list(entries):
                return self._entries(name, entries, depth)
            case "slice", [_, _, _]:
                return slice(*self._entries(name, content, depth))
            case "ellipsis", True:
                return ...
            case "float", str(text) if text in _INFINITE:
                return _INFINITE[text]
            case "dtype", str(dtype) if dtype in DTYPES:
                return DtypeName(dtype)
            case "device", "cpu":
                return DeviceName()
        raise _refusal(name, f"has the argument {value!r:.60}, which is not allowed")

    def _entries(self, name: str, values: Sequence[Any], depth: int) -> tuple[Any, ...]:
        if len(values) > MAX_ENTRIES:
            _refuse(name, f"has a list of {len(values)} entries, at most {MAX_ENTRIES} may be")
        return tuple(self._argument(name, value, depth + 1) for value in values)


def _check_inputs(custom: CustomLoss) -> None:
    if len(custom.name) > _FUNCTION_NAME_CHARACTERS:
        _refuse("", f"has a name of more than {_FUNCTION_NAME_CHARACTERS} characters")
    names = [each.name for each in custom.inputs]
    if not names or names[0] != LOGPROBS or custom.inputs[0].rank not in (1, 2):
        _refuse("", f"takes {LOGPROBS!r} of rank 1 or 2 as its first input")
    if len(names) > MAX_INPUTS:
        _refuse("", f"has {len(names)} inputs, at most {MAX_INPUTS} may be")
    if len(set(names)) < len(names):
        _refuse("", "has two inputs of one name")
    for each in custom.inputs:
        if _INPUT_NAME.fullmatch(each.name) is None or each.rank not in (0, 1, 2):
            _refuse("", f"has an input {each.name!r:.70} of rank {each.rank}; ranks are 0, 1, 2")


def _nodes_of(graph_json: str) -> list[Any]:
    if len(graph_json.encode()) > MAX_GRAPH_BYTES:
        _refuse("", f"has more than {MAX_GRAPH_BYTES} bytes")
    try:
        graph = json.loads(graph_json, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        _refuse("", f"is not JSON of numbers that are finite: {error!s:.100}")
    match graph:
        case {"format": int(number), "nodes": list(nodes), **rest} if not rest:
            if number != _FORMAT:
                _refuse("", f"has format {number!s:.20}, this release reads {_FORMAT}")
        case _:
            _refuse("", "is not an object with format and nodes")
    if len(nodes) > MAX_NODES:
        _refuse("", f"has {len(nodes)} nodes, at most {MAX_NODES} may be")
    return nodes


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} stands for itself; it is written as an object")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.20} is too large")
    return value


def _refuse(node: str, problem: str) -> NoReturn:
    raise _refusal(node, problem)


def _refusal(node: str, problem: str) -> CustomLossRefusedError:
    where = f"node {node!r:.60} " if node else ""
    return CustomLossRefusedError("loss.custom", f"{where}{problem}", node=node[:128])
