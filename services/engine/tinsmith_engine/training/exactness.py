"""The check at start: does a run get the same bits beside any other runs?

Exactness is built in: sums cut by their own length, shapes that depend on an operation alone,
padding from the sequence itself. It also rests on kernels that this code does not own. So before
an engine serves anything it trains small adapters on the model's first layers. It does so alone
and together, in two orders and with another number of threads. It compares every bit of
gradients and log-probabilities. It is a check of a second or two, with the model's own weights
and widths; it searches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from tinsmith_engine.base.types import (
    AdapterConfig,
    BatchRequest,
    BatchResult,
    Datum,
    LoraConfig,
    ModelInfo,
    RunState,
)
from tinsmith_engine.loading.base_model import REMEDY
from tinsmith_runtime.errors import ExactnessUnavailableError, TinsmithError

# Ranks and lengths: equal segments that form a group, ragged ones, and one of several sequences.
_TENANTS = (
    (8, (17,)),
    (8, (20,)),
    (4, (7,)),
    (16, (33, 3)),
)
# On a GPU: several times the keys that a program of attention takes at once.
_LONG_TENANT = (8, (700, 90))
NUM_PROBE_RUNS = len(_TENANTS) + 1
# Tokens with a loss: each is a row of the head, the largest product of most models.
_SCORED_TOKENS = 3


class _ProbedEngine(Protocol):
    """What the check needs of an engine; the methods are those of `Engine`."""

    @property
    def info(self) -> ModelInfo: ...

    def create_run(self, run: str, config: AdapterConfig) -> None: ...

    def drop_run(self, run: str) -> None: ...

    def compute(self, requests: Sequence[BatchRequest]) -> list[BatchResult | TinsmithError]: ...

    def export_state(self, run: str) -> RunState: ...

    def clear_gradient(self, run: str) -> None: ...

    def adapter_tensors(self, run: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...

    def load_adapter_tensors(self, run: str, tensors: Mapping[str, torch.Tensor]) -> None: ...


def check_exactness(engine: _ProbedEngine) -> None:
    """Train probe adapters alone and together, in an engine with room for `NUM_PROBE_RUNS`.

    Raises:
        ExactnessUnavailableError: Some bit of a run depends on its neighbours or on the threads.
    """
    requests = []
    is_on_gpu = engine.info.details["device"] != "cpu"
    tenants = (*_TENANTS, _LONG_TENANT) if is_on_gpu else _TENANTS
    for index, (rank, lengths) in enumerate(tenants):
        run = f"exactness-probe-{index}"
        engine.create_run(run, LoraConfig(rank=rank, seed=index))
        _fill_b(engine, run, index)
        limit = engine.info.max_context_tokens
        batch = [
            _datum(min(length, limit), engine.info.vocab_size, seed=100 * index + place)
            for place, length in enumerate(lengths)
        ]
        requests.append(
            BatchRequest(
                run=run, batch=batch, loss="cross_entropy", loss_config={}, is_backward=True
            )
        )
    num_threads = torch.get_num_threads()
    try:
        alone = [_bits(engine, [request])[0] for request in requests]
        _compare(engine, alone, _bits(engine, requests), "together with others")
        _compare(engine, alone, _bits(engine, requests[::-1])[::-1], "in another order")
        if is_on_gpu:
            # Threads compute nothing there; torch would only compile its kernels once more.
            return
        other = 2 if num_threads == 1 else 1
        torch.set_num_threads(other)
        _compare(engine, alone, _bits(engine, requests), f"with {other} threads")
    finally:
        torch.set_num_threads(num_threads)
        for request in requests:
            engine.drop_run(str(request.run))


def _compare(engine: _ProbedEngine, alone: list[bytes], found: list[bytes], how: str) -> None:
    if alone != found:
        raise ExactnessUnavailableError(
            f"a run gets other bits {how} than alone on this machine "
            f"({engine.info.fingerprint}); {REMEDY}"
        )


def _bits(engine: _ProbedEngine, requests: list[BatchRequest]) -> list[bytes]:
    """Return log-probabilities and gradient of each request."""
    found = []
    for request, result in zip(requests, engine.compute(requests), strict=True):
        if not isinstance(result, BatchResult):
            raise result
        run = str(request.run)
        gradient = engine.export_state(run).tensors["grad"]
        engine.clear_gradient(run)
        scores = b"".join(logprobs.tobytes() for logprobs in result.logprobs)
        found.append(scores + gradient.numpy().tobytes())
    return found


def _datum(num_tokens: int, vocab_size: int, *, seed: int) -> Datum:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, vocab_size, num_tokens + 1)
    weights = random.normal(size=num_tokens).astype(np.float32)
    weights[:-_SCORED_TOKENS] = 0.0
    return Datum(tokens[:-1], tokens[1:], {"weights": weights})


def _fill_b(engine: _ProbedEngine, run: str, seed: int) -> None:
    """Give an adapter a B, without which A has no gradient."""
    tensors, _ = engine.adapter_tensors(run)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if ".lora_B." in name:
            tensor.normal_(std=0.02, generator=generator)
    engine.load_adapter_tensors(run, tensors)
