"""Losses as a client sends them: recorded with torch.fx and written as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch.fx.node import _get_qualified_name

from tinsmith.v1 import trainer_pb2
from tinsmith_engine import CustomInput, CustomLoss

Loss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def trace(function: Loss, ranks: Mapping[str, int]) -> CustomLoss:
    """Return a function of log-probabilities and further inputs as a custom loss."""
    nodes = [_node(node) for node in torch.fx.symbolic_trace(function).graph.nodes]
    return custom_loss(nodes, ranks, name=function.__name__)


def custom_loss(
    nodes: list[dict[str, Any]], ranks: Mapping[str, int] | None = None, *, name: str = "loss"
) -> CustomLoss:
    """Return a custom loss of some nodes."""
    inputs = (CustomInput(key, rank) for key, rank in (ranks or {"logprobs": 1}).items())
    return CustomLoss(name, tuple(inputs), json.dumps({"format": 1, "nodes": nodes}))


def encode_custom(custom: CustomLoss) -> trainer_pb2.CustomLoss:
    """Return the message of a custom loss."""
    return trainer_pb2.CustomLoss(
        name=custom.name,
        inputs=[
            trainer_pb2.CustomLoss.Input(name=each.name, rank=each.rank) for each in custom.inputs
        ],
        graph_json=custom.graph_json,
    )


def placeholder(name: str = "logprobs") -> dict[str, Any]:
    """Return the node of an argument."""
    return {"op": "placeholder", "name": name, "target": name, "args": [], "kwargs": {}}


def call(name: str, target: str, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the node of a function."""
    return {
        "op": "call_function",
        "name": name,
        "target": target,
        "args": list(args),
        "kwargs": kwargs,
    }


def method(name: str, target: str, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the node of a method."""
    return {**call(name, target, *args, **kwargs), "op": "call_method"}


def output(loss: str, **metrics: str) -> dict[str, Any]:
    """Return the node of what a loss returns; a metric `a_sum` is `custom/a:sum`."""
    named = {f"custom/{key.replace('_', ':')}": {"ref": node} for key, node in metrics.items()}
    returned = {"tuple": [{"ref": loss}, {"dict": named}]}
    return {"op": "output", "name": "output", "target": "output", "args": [returned]}


def ref(name: str) -> dict[str, str]:
    """Return a reference to a node."""
    return {"ref": name}


def _node(node: torch.fx.Node) -> dict[str, Any]:
    target = str(node.target)
    if node.op == "call_function":
        target = _get_qualified_name(node.target).replace("_operator.", "operator.")  # type: ignore[arg-type]
    return {
        "op": node.op,
        "name": node.name,
        "target": target,
        "args": [_argument(each) for each in node.args],
        "kwargs": {key: _argument(each) for key, each in node.kwargs.items()},
    }


def _argument(value: Any) -> Any:
    match value:
        case torch.fx.Node():
            return ref(value.name)
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case list():
            return [_argument(each) for each in value]
        case tuple():
            return {"tuple": [_argument(each) for each in value]}
        case dict():
            return {"dict": {key: _argument(each) for key, each in value.items()}}
        case slice():
            return {"slice": [_argument(each) for each in (value.start, value.stop, value.step)]}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case _ if value is Ellipsis:
            return {"ellipsis": True}
    return value
