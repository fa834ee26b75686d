"""Hostile graphs of custom losses are refused by node, or fail typed in bounded memory."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest
from tests.fakes.traced_losses import (
    call,
    custom_loss,
    method,
    output,
    placeholder,
    ref,
)

from tinsmith_engine import BatchRequest, CustomInput, CustomLoss, Datum
from tinsmith_engine.losses.custom_loss import (
    MAX_WORK,
    TOKENS_OF_DATUM,
    CustomLossError,
    compute_custom_loss,
)
from tinsmith_engine.losses.loss_graphs import MAX_GRAPH_BYTES, read_graph
from tinsmith_engine.training import batch_validation
from tinsmith_engine.training.batch_jobs import Job
from tinsmith_runtime.errors import CustomLossRefusedError, EmptyBatchError

END = [method("total", "sum", ref("x")), output("total")]


def of(*nodes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes of a loss that sums `x`."""
    return [placeholder(), *nodes, *END]


def doubled(number: int) -> list[dict[str, Any]]:
    nodes = [call("x0", "operator.mul", ref("logprobs"), 1.0)]
    nodes += [
        call(f"x{index + 1}", "torch.cat", [ref(f"x{index}"), ref(f"x{index}")])
        for index in range(number)
    ]
    return of(*nodes, call("x", "torch.neg", ref(f"x{number}")))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


X = ref("logprobs")


REFUSED_AT_ONCE: dict[str, list[Any]] = {
    "unknown-function": of(call("x", "torch.no_such", X)),
    "system": of(call("x", "os.system", "true")),
    "eval": of(call("x", "eval", "1")),
    "builtin-import": of(call("x", "builtins.__import__", "os")),
    "load": of(call("x", "torch.load", X)),
    "random": of(call("x", "torch.rand_like", X)),
    "dropout": of(call("x", "torch.nn.functional.dropout", X)),
    "bernoulli-method": of(method("x", "bernoulli", X)),
    "dunder-method": of(method("x", "__class__", X)),
    "dunder-reduce": of(method("x", "__reduce_ex__", X, 2)),
    "backward": of(method("x", "backward", X)),
    "item": of(method("x", "item", X)),
    "numpy": of(method("x", "numpy", X)),
    "storage": of(method("x", "data_ptr", X)),
    "in-place-method": of(method("x", "add_", X, 1)),
    "in-place-operator": of(call("x", "operator.iadd", X, 1)),
    "operator-attrgetter": of(call("x", "operator.attrgetter", "__class__")),
    "operator-methodcaller": of(call("x", "operator.methodcaller", "backward")),
    "operator-setitem": of(call("x", "operator.setitem", X, 0, 1.0)),
    "as-strided": of(method("x", "as_strided", X, [9], [1])),
    "set": of(method("x", "set_", X)),
    "register-hook": of(method("x", "register_hook", X)),
    "factorial": of(call("x", "math.factorial", 100000)),
    "einsum": of(call("x", "torch.functional.einsum", "i,j->ij", X, X)),
    "getattr-dunder": of(call("x", "getattr", X, "__class__")),
    "getattr-grad": of(call("x", "getattr", X, "grad_fn")),
    "getattr-data": of(call("x", "getattr", X, "data")),
    "getattr-default": of(call("x", "getattr", X, "shape", X)),
    "getattr-of-text": of(call("x", "getattr", "shape", "shape")),
    "get-attr-node": of({**call("x", "weight"), "op": "get_attr"}),
    "module": of({**call("x", "layer"), "op": "call_module"}),
    "text-argument": of(call("x", "torch.add", X, "1")),
    "text-rounding": of(call("x", "torch.div", X, 2, rounding_mode="../../etc")),
    "out": of(call("x", "torch.exp", X, out=X)),
    "inplace": of(call("x", "torch.nn.functional.relu", X, inplace=True)),
    "inplace-by-position": of(call("x", "torch.nn.functional.relu", X, True)),
    "requires-grad": of(call("x", "torch.ones_like", X, requires_grad=True)),
    "other-device": of(call("x", "torch.zeros", 3, device={"device": "cuda"})),
    "meta-device": of(call("x", "torch.zeros", 3, device={"device": "meta"})),
    "complex": of(method("x", "to", X, {"dtype": "complex64"})),
    "half": of(method("x", "to", X, {"dtype": "float8_e4m3fn"})),
    "layout": of(call("x", "torch.zeros", 3, layout={"layout": "sparse_coo"})),
    "unknown-argument-kind": of(call("x", "torch.add", X, {"pickle": "gASV"})),
    "two-kinds": of(call("x", "torch.add", X, {"ref": "logprobs", "tuple": []})),
    "unknown-keyword": of(call("x", "torch.exp", X, generator=1)),
    "itself": of(call("x", "torch.exp", ref("x"))),
    "cycle": of(call("y", "torch.exp", ref("x")), call("x", "torch.exp", ref("y"))),
    "forward-reference": of(call("x", "torch.exp", ref("total"))),
    "same-name-twice": of(call("x", "torch.exp", X), call("x", "torch.exp", X)),
    "name-of-a-placeholder": of(call("logprobs", "torch.exp", X)),
    "no-name": of({**call("x", "torch.exp", X), "name": ""}),
    "long-name": of(call("y" * 10_000, "torch.exp", X)),
    "name-no-text": of({**call("x", "torch.exp", X), "name": 3}),
    "target-no-text": of({**call("x", "torch.exp", X), "target": ["torch.exp"]}),
    "args-no-list": of({**call("x", "torch.exp"), "args": {"0": X}}),
    "kwargs-no-object": of({**call("x", "torch.exp", X), "kwargs": [1]}),
    "extra-field": of({**call("x", "torch.exp", X), "meta": {}}),
    "unknown-op": of({**call("x", "torch.exp", X), "op": "exec"}),
    "node-no-object": of("torch.exp"),  # type: ignore[arg-type]
    "huge-integer": of(call("x", "operator.mul", X, 10**40)),
    "deep-list": of(call("x", "torch.cat", nested(9))),
    "long-list": of(call("x", "torch.cat", [X] * 100)),
    "many-arguments": of(call("x", "torch.zeros", *[1] * 100)),
    "too-many-nodes": of(*(call(f"y{index}", "torch.exp", X) for index in range(600))),
    "placeholder-late": [*of(call("x", "torch.exp", X)), placeholder("y")],
    "placeholder-default": [{**placeholder(), "args": [1.0]}, *END],
    "placeholder-of-another": [placeholder("weights"), *END],
    "no-placeholder": [call("x", "torch.zeros", 3), *END],
    "no-output": [placeholder(), call("x", "torch.exp", X)],
    "two-outputs": [*of(call("x", "torch.exp", X)), output("total")],
    "output-alone": [placeholder(), {**output("x"), "args": [X]}],
    "output-constant": [placeholder(), {**output("x"), "args": [{"tuple": [1.0, {"dict": {}}]}]}],
    "output-unknown": [placeholder(), output("nothing")],
    "metric-name": [
        placeholder(),
        {**output("x"), "args": [{"tuple": [X, {"dict": {"loss:sum": X}}]}]},
    ],
    "metric-constant": [
        placeholder(),
        {**output("x"), "args": [{"tuple": [X, {"dict": {"custom/a:sum": 1.0}}]}]},
    ],
    "many-metrics": [
        placeholder(),
        output("logprobs", **{f"m{i}_sum": "logprobs" for i in range(99)}),
    ],
    "empty": [],
}


@pytest.mark.parametrize("nodes", REFUSED_AT_ONCE.values(), ids=REFUSED_AT_ONCE)
def test_hostile_graphs_are_refused_before_anything_is_computed(nodes: list[Any]) -> None:
    with pytest.raises(CustomLossRefusedError) as refused:
        read_graph(custom_loss(nodes))
    assert len(refused.value.message) < 300
    assert refused.value.reason == "CUSTOM_LOSS_REFUSED"
    assert "node" in refused.value.metadata


def test_the_node_is_named() -> None:
    with pytest.raises(CustomLossRefusedError, match=r"calls the function .os\.system.") as e:
        read_graph(custom_loss(of(call("x", "os.system", "true"))))
    assert e.value.metadata["node"] == "x"


@pytest.mark.parametrize(
    "graph_json",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="cut"),
        pytest.param("[]", id="list"),
        pytest.param('{"format": 1}', id="no-nodes"),
        pytest.param('{"format": 2, "nodes": []}', id="other-format"),
        pytest.param('{"format": 1, "nodes": [], "code": "x"}', id="more-fields"),
        pytest.param('{"format": 1, "nodes": {}}', id="nodes-no-list"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param(
            '{"format": 1, "nodes": ' + "[" * 50_000 + "]" * 50_000 + "}", id="deep-nodes"
        ),
        pytest.param('{"format": 1, "nodes": [NaN]}', id="nan"),
        pytest.param('{"format": 1, "nodes": [1e999]}', id="overflow"),
        pytest.param('{"format": 1, "nodes": [' + "9" * 10_000 + "]}", id="digits"),
        pytest.param('{"format": 1, "nodes": [' + " " * MAX_GRAPH_BYTES + "]}", id="large"),
        pytest.param('{"format": true, "nodes": [1]}', id="format-true"),
        pytest.param('{"format": 1, "nodes": ["\\ud800"]}', id="surrogate"),
    ],
)
def test_what_is_no_graph_is_refused(graph_json: str) -> None:
    with pytest.raises(CustomLossRefusedError):
        read_graph(CustomLoss("f", (CustomInput("logprobs", 1),), graph_json))


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param((), id="none"),
        pytest.param((("weights", 1),), id="no-logprobs"),
        pytest.param((("logprobs", 0),), id="scalar-logprobs"),
        pytest.param((("logprobs", 3),), id="rank-3"),
        pytest.param((("logprobs", 1), ("a", -1)), id="rank-below-0"),
        pytest.param((("logprobs", 1), ("logprobs", 1)), id="twice"),
        pytest.param((("logprobs", 1), ("__class__()", 1)), id="no-name"),
        pytest.param((("logprobs", 1), *((f"a{i}", 1) for i in range(16))), id="many"),
    ],
)
def test_inputs_are_checked(inputs: tuple[tuple[str, int], ...]) -> None:
    given = tuple(CustomInput(name, rank) for name, rank in inputs)
    nodes = [*(placeholder(name) for name, _ in inputs), output("logprobs")]
    with pytest.raises(CustomLossRefusedError):
        read_graph(CustomLoss("f", given, json.dumps({"format": 1, "nodes": nodes})))


HUGE = 10**12


FAILS: dict[str, list[Any]] = {
    "huge-zeros": of(call("x", "torch.zeros", HUGE)),
    "huge-full": of(call("x", "torch.full", {"tuple": [10**6, 10**6]}, 1.0)),
    "huge-arange": of(call("x", "torch.arange", HUGE)),
    "huge-linspace": of(call("x", "torch.linspace", 0, 1, HUGE)),
    "huge-eye": of(call("x", "torch.eye", 10**6)),
    "huge-pad": of(call("x", "torch.nn.functional.pad", X, {"tuple": [0, HUGE]})),
    "huge-repeat": of(method("x", "repeat", X, HUGE)),
    "huge-expand": of(method("x", "expand", X, HUGE, 5)),
    "huge-tile": of(call("x", "torch.tile", X, {"tuple": [HUGE]})),
    "huge-repeat-interleave": of(call("x", "torch.repeat_interleave", X, HUGE)),
    "overflowing-size": of(call("x", "torch.zeros", 2**40, 2**40)),
    "doubling": doubled(40),
    "outer-of-outers": of(
        call("a", "torch.outer", X, X),
        method("b", "flatten", ref("a")),
        call("c", "torch.outer", ref("b"), ref("b")),
        method("d", "flatten", ref("c")),
        call("e", "torch.outer", ref("d"), ref("d")),
        method("f", "flatten", ref("e")),
        call("x", "torch.outer", ref("f"), ref("f")),
    ),
    "large-index": of(
        call("a", "torch.zeros", 4000, 4000),
        call("i", "torch.zeros", 4000, dtype={"dtype": "int64"}),
        call("x", "operator.getitem", ref("a"), ref("i")),
        call("y", "operator.getitem", ref("x"), ref("i")),
    ),
    "many-axes": of(call("x", "operator.getitem", X, {"tuple": [None] * 40})),
    "integer-power": of(call("y", "operator.pow", 10, 10**9), call("x", "torch.mul", X, ref("y"))),
    "integer-product": of(
        call("y", "operator.mul", 2**62, 2**62), call("x", "torch.mul", X, ref("y"))
    ),
    "imaginary": of(call("y", "operator.pow", -1.0, 0.5), call("x", "torch.mul", X, ref("y"))),
    "list-times-number": of(call("x", "operator.mul", [1], 10**9)),
    "shape-growth": of(
        call("s", "getattr", X, "shape"),
        *(
            call(
                f"s{i + 1}", "operator.add", ref(f"s{i}" if i else "s"), ref(f"s{i}" if i else "s")
            )
            for i in range(9)
        ),
        call("x", "torch.zeros", ref("s9")),
    ),
    "nested-tuples": of(
        call("s", "getattr", X, "shape"),
        call("y", "operator.getitem", {"tuple": [ref("s"), ref("s")]}, {"slice": [0, 2, None]}),
        call("x", "torch.zeros", ref("y")),
    ),
    "round-integers": of(
        call("a", "torch.full", [40], -(2**63 - 1), dtype={"dtype": "int64"}),
        call("b", "operator.sub", ref("a"), 1),
        call("x", "torch.div", ref("b"), -1, rounding_mode="trunc"),
    ),
    "divide-integers-by-zero": of(
        call("a", "torch.arange", 3), call("x", "operator.floordiv", ref("a"), 0)
    ),
    "divide-numbers-by-zero": of(
        call("y", "operator.truediv", 1, 0), call("x", "torch.mul", X, ref("y"))
    ),
    "math-domain": of(call("y", "math.sqrt", -1.0), call("x", "torch.mul", X, ref("y"))),
    "math-overflow": of(call("y", "math.exp", 1e9), call("x", "torch.mul", X, ref("y"))),
    "math-of-a-tensor": of(
        method("a", "sum", X), call("y", "math.exp", ref("a")), call("x", "torch.mul", X, ref("y"))
    ),
    "index-out-of-range": of(call("x", "operator.getitem", X, 99)),
    "gather-out-of-range": of(
        call("i", "torch.full", [5], 99, dtype={"dtype": "int64"}),
        call("x", "torch.gather", X, 0, ref("i")),
    ),
    "wrong-axis": of(call("x", "torch.sum", X, dim=7)),
    "wrong-shape": of(method("x", "view", X, 7)),
    "view-as-another-type": of(method("x", "view", X, {"dtype": "int32"})),
    "method-of-a-number": of(call("s", "torch.numel", X), method("x", "sum", ref("s"))),
    "no-arguments": of(call("x", "torch.exp")),
    "loss-no-scalar": [placeholder(), call("x", "torch.exp", X), output("x")],
    "loss-a-shape": [placeholder(), call("x", "getattr", X, "shape"), output("x")],
    "loss-an-integer": [placeholder(), method("x", "argmax", X), output("x")],
    "loss-without-logprobs": [placeholder(), call("x", "torch.zeros", []), output("x")],
    "loss-detached": [
        placeholder(),
        method("y", "sum", X),
        method("x", "detach", ref("y")),
        output("x"),
    ],
    "metric-no-scalar": [placeholder(), method("x", "sum", X), output("x", a_sum="logprobs")],
}


@pytest.mark.parametrize("nodes", FAILS.values(), ids=FAILS)
def test_hostile_graphs_fail_typed_and_do_not_take_the_memory(nodes: list[Any]) -> None:
    graph = read_graph(custom_loss(nodes))
    logprobs = np.linspace(-3.0, -1.0, 5, dtype=np.float32)
    before = logprobs.copy()
    with pytest.raises(CustomLossError) as failed:
        compute_custom_loss(graph, [logprobs], needs_gradient=True)
    assert len(failed.value.problem) < 300
    np.testing.assert_array_equal(logprobs, before)


def test_there_are_enough_of_them() -> None:
    assert len(REFUSED_AT_ONCE) + len(FAILS) >= 100


LARGE = 1 << 17
READS = {
    "reductions": [
        call("z", "torch.linspace", 0, 1, LARGE),
        *(call(f"m{index}", "torch.norm", ref("z"), 2.5) for index in range(8)),
    ],
    "products": [
        call("z", "torch.linspace", 0, 1, LARGE),
        method("wide", "reshape", ref("z"), 1, LARGE),
        method("high", "reshape", ref("z"), LARGE, 1),
        *(call(f"m{index}", "torch.matmul", ref("wide"), ref("high")) for index in range(3)),
    ],
    "broadcasts": [
        call("z", "torch.linspace", 0, 1, 1 << 9),
        method("high", "reshape", ref("z"), 1 << 9, 1),
        *(call(f"p{index}", "torch.pow", ref("z"), ref("high")) for index in range(3)),
    ],
}


@pytest.mark.parametrize("nodes", READS.values(), ids=READS)
def test_what_a_loss_reads_is_bounded_by_its_tokens(nodes: list[Any]) -> None:
    """Each of these nodes reads or gives little, and takes as long as a hundred tokens."""
    graph = json.dumps({"format": 1, "nodes": of(*nodes, call("x", "torch.neg", X))})
    loss = CustomLoss(name="reads", inputs=(CustomInput("logprobs", 1),), graph_json=graph)
    compute_custom_loss(read_graph(loss), [np.zeros(480, np.float32)], needs_gradient=True)
    with pytest.raises(CustomLossError, match="reads more elements than the tokens"):
        compute_custom_loss(read_graph(loss), [np.zeros(5, np.float32)], needs_gradient=True)


def test_what_a_loss_reads_is_bounded_whatever_its_length() -> None:
    nodes = [
        call("z", "torch.linspace", 0, 1, MAX_WORK // 8),
        *(call(f"m{index}", "torch.norm", ref("z"), 2.5) for index in range(9)),
    ]
    graph = json.dumps({"format": 1, "nodes": of(*nodes, call("x", "torch.neg", X))})
    loss = CustomLoss(name="reads", inputs=(CustomInput("logprobs", 1),), graph_json=graph)
    with pytest.raises(CustomLossError, match="reads more elements than the tokens"):
        compute_custom_loss(read_graph(loss), [np.zeros(100_000, np.float32)], needs_gradient=True)


def test_many_short_datums_are_parted_by_what_they_may_read() -> None:
    """Others wait for a microbatch, and each datum may read as much as many tokens."""
    loss = CustomLoss(
        name="short", inputs=(CustomInput("logprobs", 1),), graph_json=json.dumps({"nodes": []})
    )
    tokens = np.zeros(1, dtype=np.int64)
    batch = [Datum(tokens_T=tokens, targets_T=tokens, loss_inputs={}) for _ in range(100)]
    for name, custom, most in (
        ("custom", loss, 512 // (TOKENS_OF_DATUM + 1)),
        ("cross_entropy", None, 100),
    ):
        request = BatchRequest(
            run=None, batch=batch, loss=name, loss_config={}, is_backward=True, custom=custom
        )
        job = Job(request, None, micro_batch_tokens=512)
        job.begin()
        assert max(map(len, job.microbatches)) == most
        assert sum(map(len, job.microbatches)) == 100


def test_sizes_are_loaded_before_a_loss_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes torch seconds, for which all others would wait on the engine's thread."""
    loaded: list[None] = []
    monkeypatch.setattr(f"{compute_custom_loss.__module__}.load_sizes", lambda: loaded.append(None))
    graph = json.dumps({"format": 1, "nodes": of(call("x", "torch.neg", X))})
    loss = CustomLoss(name="any", inputs=(CustomInput("logprobs", 1),), graph_json=graph)
    with pytest.raises(EmptyBatchError):
        batch_validation.validate_batch([], "custom", {}, cast(Any, None), custom=loss)
    assert len(loaded) == 1


def matrices(name: str) -> list[dict[str, Any]]:
    return [
        call(name, "torch.linspace", 0, 1, 16 * 64 * 64),
        method(f"{name}m", "reshape", ref(name), 16, 64, 64),
    ]


CHEAP = {
    "views": [
        call("v0", "torch.linspace", 0, 1, LARGE),
        *(method(f"v{index + 1}", "unsqueeze", ref(f"v{index}"), 0) for index in range(10)),
        *(method(f"n{index}", "numel", ref("v10")) for index in range(100)),
    ],
    "batches-of-matrices": [
        *matrices("a"),
        *matrices("b"),
        call("c", "torch.bmm", ref("am"), ref("bm")),
    ],
}


@pytest.mark.parametrize("nodes", CHEAP.values(), ids=CHEAP)
def test_what_reads_little_is_charged_little(nodes: list[Any]) -> None:
    graph = json.dumps({"format": 1, "nodes": of(*nodes, call("x", "torch.neg", X))})
    loss = CustomLoss(name="cheap", inputs=(CustomInput("logprobs", 1),), graph_json=graph)
    compute_custom_loss(read_graph(loss), [np.zeros(480, np.float32)], needs_gradient=True)


def test_a_product_of_matrices_is_charged_what_it_reads() -> None:
    nodes = of(*CHEAP["batches-of-matrices"], call("x", "torch.neg", X))
    graph = json.dumps({"format": 1, "nodes": nodes})
    loss = CustomLoss(name="dear", inputs=(CustomInput("logprobs", 1),), graph_json=graph)
    with pytest.raises(CustomLossError, match="reads more elements than the tokens"):
        compute_custom_loss(read_graph(loss), [np.zeros(5, np.float32)], needs_gradient=True)
