"""Computes custom losses: value, derivative by log-probability, and metrics of one datum.

A graph that `loss_graphs` has read is carried out node by node, in float32 on the CPU, with
autograd. The functions are those of the tables in `loss_operations`, looked up once when this
module is loaded. What a graph can ask for in memory is known before it is allocated: an operation
whose result may be larger than its arguments is first made on tensors without data (torch's `meta`
device). Nothing is written in place, so that no node changes what another one holds.

Whatever goes wrong is said of the node and is the client's own fault: a shape that does not fit, an
index out of range, a result that is too large.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_engine.base.memory import is_out_of_memory
from tinsmith_engine.losses.loss_graphs import (
    MAX_ENTRIES,
    MAX_INTEGER,
    Call,
    DeviceName,
    DtypeName,
    LossGraph,
    Ref,
)
from tinsmith_engine.losses.loss_operations import FUNCTIONS, METHODS, Growth

MAX_ELEMENTS = 1 << 24
"""Of one tensor."""
MAX_TOTAL_ELEMENTS = 1 << 27
"""Of all tensors of a datum together: autograd keeps them all."""
ELEMENTS_OF_TOKEN = 1 << 15
"""How many of them each token brings."""
WORK_OF_TOKEN = 1 << 11
"""How many elements of arguments each token lets be read, so that the time of a batch is in
proportion to it: a reduction of millions of elements gives one. The slowest operation takes 130 ns
for an element with its derivative, and others wait for a microbatch."""
MAX_WORK = 1 << 23
"""How many elements of arguments a datum may read, whatever its length: others wait for it."""
_FREE_ELEMENTS, _FREE_WORK = 1 << 20, 1 << 18
TOKENS_OF_DATUM = _FREE_WORK // WORK_OF_TOKEN
"""A datum counts as so many tokens more where a batch is split: so much may be read for any."""
_PRODUCTS_OF_READ = 16
"""Products of a matrix multiplication that take as long as an element which is read, at most."""
_MATMULS = frozenset({"torch.matmul", "torch.mm", "torch.mv", "torch.bmm", "operator.matmul"})
_VIEWS = frozenset(
    {
        *("getattr", "view", "view_as", "squeeze", "unsqueeze", "transpose", "t", "permute"),
        *("movedim", "detach", "numel", "size", "dim", "ndimension"),
        *("expand", "expand_as", "broadcast_to"),
    }
)
"""Operations that read no element, and whose derivatives do not. Parts of a tensor are none of
them: their derivative is as large as the whole."""
_MAX_AXES = 16
_MAX_POWER_BITS = 64

_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    UserWarning,
    ValueError,
)
"""What torch and Python raise for arguments that do not fit; a warning where it is an error."""
_CREATED = frozenset(
    f"torch.{name}" for name in ("zeros", "ones", "full", "arange", "linspace", "eye")
)
_ROUNDING = frozenset({"div", "divide"})
_ATTRIBUTES: Mapping[str, Callable[[Any], Any]] = {
    "shape": lambda tensor: tensor.shape,
    "dtype": lambda tensor: tensor.dtype,
    "device": lambda tensor: tensor.device,
    "ndim": lambda tensor: tensor.ndim,
    "T": lambda tensor: tensor.t(),
}
_PAIR = {"values": 0, "indices": 1}
_SCALARS = (bool, int, float)
_PLAIN = (Tensor, bool, int, float, torch.dtype, torch.device)


class CustomLossError(Exception):
    """A node cannot be computed."""

    def __init__(self, node: str, problem: str) -> None:
        super().__init__(f"node {node}: {problem}")
        self.node, self.problem = node, problem


class CustomValue(NamedTuple):
    """What a custom loss gave for one datum."""

    loss: float
    dlogprobs: Tensor
    """d loss / d logprobs, float32 in the shape of the log-probabilities."""
    metrics: dict[str, float]


def compute_custom_loss(
    graph: LossGraph, inputs: Sequence[NDArray[Any]], *, needs_gradient: bool
) -> CustomValue:
    """Return value, derivative and metrics of a custom loss.

    Args:
        graph: The loss.
        inputs: Its arguments in order, log-probabilities [T] or [T, K] first; not written to.
        needs_gradient: Whether a loss that does not depend on the log-probabilities is refused.

    Raises:
        CustomLossError: A node cannot be computed, or the loss is no scalar.
    """
    values = _Values(num_tokens=inputs[0].shape[0])
    # Of its own, for autograd and because the array is the caller's.
    logprobs = torch.from_numpy(np.array(inputs[0], dtype=np.float32)).requires_grad_()
    with torch.enable_grad():
        for node, array in zip(graph.inputs, (logprobs, *inputs[1:]), strict=True):
            values.put(node, array if array is logprobs else torch.from_numpy(np.array(array)))
        for call in graph.calls:
            values.put(call.node, _caught(call.node, functools.partial(values.result, call)))
        loss = _scalar(values, graph.loss, "is the loss")
        if not loss.is_floating_point():
            raise CustomLossError(graph.loss, f"is the loss and of {loss.dtype}")
        if loss.requires_grad:
            [gradient] = _caught(
                graph.loss, lambda: torch.autograd.grad(loss, [logprobs], allow_unused=True)
            )
        elif needs_gradient:
            raise CustomLossError(graph.loss, "is the loss and does not depend on logprobs")
        else:
            gradient = None
    metrics = {
        name: float(_scalar(values, node, f"is the metric {name}").detach())
        for name, node in graph.metrics.items()
    }
    dlogprobs = torch.zeros_like(logprobs) if gradient is None else gradient
    return CustomValue(float(loss.detach()), dlogprobs.detach(), metrics)


@functools.cache
def load_sizes() -> None:
    """Import what torch computes sizes of results with, which takes it seconds.

    The first result that is made without data does so otherwise, on the thread that all wait for.
    """
    for create in (torch.arange, torch.eye):
        create(1, device="meta")


class _Values:
    """The values of the nodes so far, and what may still be allocated."""

    def __init__(self, *, num_tokens: int) -> None:
        self._values: dict[str, Any] = {}
        limit = _FREE_ELEMENTS + num_tokens * ELEMENTS_OF_TOKEN
        self._num_left = min(limit, MAX_TOTAL_ELEMENTS)
        self._work_left = min(_FREE_WORK + num_tokens * WORK_OF_TOKEN, MAX_WORK)

    def put(self, node: str, value: Any) -> None:
        """Keep the value of a node."""
        self._values[node] = value

    def get(self, node: str) -> Any:
        """Return the value of a node."""
        return self._values[node]

    def result(self, call: Call) -> Any:
        """Return what a node computes."""
        args = [self._argument(each) for each in call.args]
        kwargs = {name: self._argument(each) for name, each in call.kwargs.items()}
        function = (_METHODS if call.is_method else _FUNCTIONS)[call.target]
        operation = (METHODS if call.is_method else FUNCTIONS)[call.target]
        _check_operands(call, args, kwargs)
        if call.target == "operator.getitem":
            args = _with_places(args)
        if self._may_be_large(call, operation.growth, args, kwargs):
            shadows = {name: _shadow(each) for name, each in kwargs.items()}
            if call.target in _CREATED:
                shadows["device"] = torch.device("meta")
            with torch.no_grad():
                self._check_size(function(*(_shadow(each) for each in args), **shadows))
        if call.target.removeprefix("torch.") not in _VIEWS:
            self._take_work(call, operation.growth, _tensors([*args, *kwargs.values()]))
        found = _checked(function(*args, **kwargs))
        self._num_left -= self._check_size(found)
        return found

    def _argument(self, value: Any, *, is_inside: bool = False) -> Any:
        match value:
            case Ref(node):
                found = self._values[node]
                if is_inside and not isinstance(found, _PLAIN):
                    raise TypeError("a list holds tensors and numbers, not other lists")
                return found
            case DtypeName(name):
                return getattr(torch, name)
            case DeviceName():
                return torch.device("cpu")
            case list() | tuple():
                return type(value)(self._argument(each, is_inside=True) for each in value)
            case slice():
                ends = (value.start, value.stop, value.step)
                return slice(*(self._argument(each, is_inside=True) for each in ends))
        return value

    def _may_be_large(
        self, call: Call, growth: Growth, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether the result of an operation is to be made without data first."""
        tensors = _tensors([*args, *kwargs.values()])
        limit = min(MAX_ELEMENTS, self._num_left)
        match growth:
            case Growth.BOUNDED:
                return False
            case Growth.BROADCAST:
                return _num_broadcast(tensors) > limit
            case Growth.PRODUCT:
                return math.prod(max(tensor.numel(), 1) for tensor in tensors) > limit
            case Growth.FREE:
                return call.target != "operator.getitem" or not _is_view(args[1])

    def _take_work(self, call: Call, growth: Growth, tensors: Sequence[Tensor]) -> None:
        work = sum(tensor.numel() for tensor in tensors)
        if growth is Growth.BROADCAST:
            # Two short arguments may give a long result, each element of which is computed.
            work = max(work, _num_broadcast(tensors))
        name = call.target if "." in call.target else f"torch.{call.target}"
        if name in _MATMULS and len(tensors) == 2:
            # Each element of the result is a sum over the axis that both have.
            left, right = tensors
            products = math.prod(np.broadcast_shapes(left.shape[:-2], right.shape[:-2]))
            products *= math.prod(left.shape[-2:]) * (right.shape[-1] if right.ndim > 1 else 1)
            work += products // _PRODUCTS_OF_READ
        if work > self._work_left:
            raise ValueError("reads more elements than the tokens of a datum let a loss read")
        self._work_left -= work

    def _check_size(self, found: Any) -> int:
        """Return how many elements a result has, if that is not too many."""
        num_elements = 0
        for tensor in _tensors([found]):
            if tensor.numel() > MAX_ELEMENTS or tensor.ndim > _MAX_AXES:
                raise ValueError(f"gives a tensor {list(tensor.shape)[:_MAX_AXES]}, too large")
            num_elements += tensor.numel()
        if num_elements > self._num_left:
            raise ValueError("gives more elements than a loss may have in all")
        return num_elements


def _num_broadcast(tensors: Sequence[Tensor]) -> int:
    """Return how many elements come of arguments that are broadcast against each other."""
    return math.prod(np.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors)))


def _caught(node: str, compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except _FAULTS as error:
        if is_out_of_memory(error):
            raise
        raise CustomLossError(node, f"{type(error).__name__}: {error!s:.200}") from error


def _scalar(values: _Values, node: str, what: str) -> Tensor:
    value = values.get(node)
    if not isinstance(value, Tensor) or value.ndim != 0:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CustomLossError(node, f"{what} and no scalar tensor: {shape}")
    return value


def _tensors(values: Sequence[Any]) -> Sequence[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


def _shadow(value: Any) -> Any:
    """Return an argument without data, of the same shape and type."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_shadow(each) for each in value)
    return value


def _check_operands(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what Python or torch would take and should not."""
    if call.target.startswith("math.") and not all(isinstance(each, _SCALARS) for each in args):
        raise TypeError("math takes numbers; torch has the same function for tensors")
    if call.target.startswith("operator.") and call.target != "operator.getitem":
        _check_operator(call.target, args)
    if call.is_method and not (args and isinstance(args[0], Tensor)):
        raise TypeError("a method is called on a tensor")
    name = call.target.rpartition(".")[2]
    is_rounded = name in _ROUNDING and kwargs.get("rounding_mode") is not None
    operands = _tensors([*args, *kwargs.values()])
    if is_rounded and not any(tensor.is_floating_point() for tensor in operands):
        # The smallest integer by -1 ends the process.
        raise TypeError("rounds a quotient of integers; use floor_divide")
    if name in ("view", "reshape") and any(isinstance(each, torch.dtype) for each in args):
        raise TypeError("takes a shape")


def _check_operator(target: str, args: Sequence[Any]) -> None:
    is_sizes = [isinstance(each, torch.Size | tuple) for each in args]
    if target == "operator.add" and all(is_sizes):
        if sum(len(each) for each in args) > MAX_ENTRIES:
            raise ValueError("makes too long a list")
        return
    if target in ("operator.eq", "operator.ne") and all(is_sizes):
        return
    if not all(isinstance(each, Tensor | bool | int | float) for each in args):
        raise TypeError("takes tensors and numbers")
    if target == "operator.pow" and all(isinstance(each, int) for each in args):
        base, exponent = args
        if exponent > 0 and base.bit_length() * exponent > _MAX_POWER_BITS:
            raise ValueError("gives an integer of more than 64 bits")


def _with_places(args: Sequence[Any]) -> list[Any]:
    """Return the arguments of an indexing, masks replaced by the places where they are set.

    The size of the result then follows from the shapes of the arguments.
    """
    owner, index = args
    if not isinstance(owner, Tensor):
        if not isinstance(owner, tuple) or not isinstance(index, int | slice):
            raise TypeError("takes an element of a tensor or of a shape")
        return [owner, index]
    entries = index if isinstance(index, tuple) else (index,)
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
            if entry.ndim == 0:
                raise TypeError("takes a mask of at least one axis")
            found += entry.nonzero(as_tuple=True)
        else:
            found.append(entry)
    return [owner, tuple(found)]


def _is_view(index: Any) -> bool:
    """Whether an index takes a part of a tensor, rather than looking elements up."""
    entries = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(each, Tensor | list | tuple) for each in entries)


def _checked(value: Any) -> Any:
    """Return a result, if it is of a class that a graph may hold."""
    if isinstance(value, Tensor):
        if value.is_complex() or value.is_sparse:
            raise TypeError("gives complex numbers")
        return value
    if isinstance(value, bool | float | torch.Size | torch.dtype | torch.device):
        return value
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise ValueError("gives an integer of more than 64 bits")
        return value
    is_short = isinstance(value, tuple) and len(value) <= MAX_ENTRIES
    if is_short and all(isinstance(each, _PLAIN) for each in value):
        return value
    raise TypeError(f"gives a {type(value).__name__}, which a custom loss cannot hold")


def _read_attribute(owner: Any, attribute: str) -> Any:
    if isinstance(owner, Tensor) and attribute in _ATTRIBUTES:
        return _ATTRIBUTES[attribute](owner)
    if isinstance(owner, tuple) and attribute in _PAIR and len(owner) == len(_PAIR):
        return owner[_PAIR[attribute]]
    raise AttributeError(f"{type(owner).__name__} has no {attribute}")


def _look_up(name: str) -> Callable[..., Any]:
    """Return the function that an entry of the list names."""
    if name == "getattr":
        return _read_attribute
    library, _, path = name.partition(".")
    found: Any = {"torch": torch, "math": math, "operator": operator}[library]
    for part in path.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {name: _look_up(name) for name in FUNCTIONS}
_METHODS: Mapping[str, Callable[..., Any]] = {name: getattr(Tensor, name) for name in METHODS}
