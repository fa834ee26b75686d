"""The operations that are compiled: as functions, for a compiler takes seconds for each test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tinsmith_engine.model.compiled_ops import compile_ops
from tinsmith_engine.model.decoder_config import DecoderConfig
from tinsmith_engine.products.ops import EAGER, Ops
from tinsmith_runtime.errors import ConfigError

CONFIG = DecoderConfig(
    family="qwen3",
    vocab_size=96,
    hidden_size=24,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_eps=1e-6,
    max_positions=64,
    is_tied=True,
    has_qk_norm=True,
    inverse_frequencies=torch.ones(4),
    rope_scale=1.0,
)


def operations() -> Ops:
    return compile_ops(CONFIG, torch.float32, torch.device("cpu"))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def calls() -> dict[str, list[tuple[Any, ...]]]:
    """Arguments for each operation, of five rows."""
    x, delta, weight = random(5, 24), random(5, 24).flip(0), random(24)
    heads, of_heads = random(5, 4, 8), random(4, 8)
    inverse_rms, norms = random(5, 1).abs(), random(5, 4, 1).abs()
    cos, sin = random(5, 1, 4), random(5, 1, 4).flip(0)
    return {
        "rms_norm": [(x, weight, 1e-6)],
        "add_rms_norm": [(delta, x, weight, 1e-6)],
        "rms_norm_backward": [
            (delta, x, inverse_rms, weight, None),
            (delta, x, inverse_rms, weight, random(5, 24) + 1),
        ],
        "rotate": [(heads, cos, sin)],
        "norm_rotate": [(heads, of_heads, 1e-6, cos, sin)],
        "norm_rotate_backward": [(heads, heads.flip(0), norms, of_heads, cos, sin)],
        "swiglu": [(random(5, 24),)],
        "swiglu_backward": [(random(5, 12), random(5, 24))],
    }


@pytest.mark.parametrize("name", calls())
def test_what_is_compiled_computes_what_the_written_out_operation_does(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    made = operations()
    for arguments in calls()[name]:
        found, wanted = (
            # Some write to their arguments.
            getattr(ops, name)(*[a.clone() if isinstance(a, Tensor) else a for a in arguments])
            for ops in (made, EAGER)
        )
        torch.testing.assert_close(found, wanted)


def test_all_are_compiled_at_start_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: dict[int, Tensor] = {}
    called: dict[str, list[Any]] = {}

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        assert options == {"fullgraph": True, "dynamic": False}

        def call(*arguments: Any) -> Any:
            called.setdefault(function.__name__, []).extend(arguments)
            return function(*arguments)

        return call

    def mark(tensor: Tensor, dimension: int) -> None:
        assert dimension == 0
        marked[id(tensor)] = tensor

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr("torch._dynamo.mark_dynamic", mark)
    operations()

    assert {name.removeprefix("_") for name in called} == calls().keys()
    tensors = [each for group in called.values() for each in group if isinstance(each, Tensor)]
    unmarked = [each for each in tensors if id(each) not in marked]
    assert {tuple(each.shape) for each in unmarked} == {(24,), (6, 8)}
    assert len({len(each) for each in marked.values()}) == 2, "one number would be taken as fixed"


def test_a_machine_without_a_compiler_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no g++")

    monkeypatch.setattr(torch, "compile", lambda function, **_: refuse)
    with pytest.raises(ConfigError, match=r"no g\+\+.*compile=false"):
        operations()
