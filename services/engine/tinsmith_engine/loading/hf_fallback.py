"""Any other decoder, through its transformers module: slower, but correct.

LoRA is added by forward hooks on the module's linear layers, so the module keeps its own names and
code. The adapter's gradients go straight to the run's row, as in the packed decoder; everything
else is autograd's. Sequences of equal length run as one batch without padding, because not every
architecture is indifferent to padding.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith_engine.arena.adapter_targets import TargetSpec
from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.lora.lora import LoraTarget
from tinsmith_engine.model.lm_head import HeadScores, KnownLosses, NoLosses, RowLosses
from tinsmith_engine.model.model_protocol import Pass, RunTensors
from tinsmith_engine.products.split_products import WHOLE
from tinsmith_runtime.errors import ModelNotFoundError

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FUSED_DIM = 3
# What chooses experts is no layer of the model to be adapted: a small change of it moves tokens.
_ROUTERS = {"gate", "router", "shared_expert_gate"}


@dataclass(frozen=True, slots=True)
class FallbackWeights:
    """A run as the module sees it: adapters by module path, or parameters by name."""

    adapters: Mapping[str, LoraTarget]
    parameters: Mapping[str, Tensor]
    """Of a full-parameter run, in the model's dtype, as autograd leaves."""
    parameter_grads: Mapping[str, Tensor]


class FallbackModel:
    """A transformers causal language model with our adapters on its linear layers."""

    row_quantum = 1
    groups_adapters = False
    trains_all = True

    def __init__(self, module: nn.Module, head: nn.Module | None) -> None:
        self._module = module.eval().requires_grad_(False)
        parameters = dict(module.named_parameters())
        self.full_layout = ParameterLayout([(n, tuple(p.shape)) for n, p in parameters.items()])
        loras: list[TargetSpec] = []
        self._parameters = parameters
        self._adapters: Mapping[str, LoraTarget] = {}
        # Autograd follows an operation only if an input needs a gradient; below the first layer
        # of a frozen model none does, so each adapter also takes this empty one.
        self._anchor = torch.empty(0, requires_grad=True)
        has_experts = _has_experts(module)
        others: list[str] = []
        self.other_modules: Sequence[str] = others
        self.unreachable_experts: Sequence[str] = _unreachable_experts(module)
        self.unreachable_layers: Mapping[str, str] = _unreachable_layers(module)
        for name, layer in module.named_modules():
            if not isinstance(layer, nn.Linear):
                continue
            if has_experts and _ROUTERS & set(name.split(".")):
                others.append(name)
            else:
                kind = "unembedding" if layer is head else _kind(name)
                loras.append(TargetSpec((name,), layer.in_features, (layer.out_features,), kind))
                layer.register_forward_hook(self._hook(name))
        self.lora_targets: Sequence[TargetSpec] = loras

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, device: torch.device) -> FallbackModel:
        """Load a model directory.

        Raises:
            ModelNotFoundError: transformers cannot build a causal language model from it.
        """
        from transformers import AutoModelForCausalLM

        try:
            with warnings.catch_warnings():
                # Deprecations inside an architecture's own code are not the caller's business.
                warnings.simplefilter("ignore")
                module: Any = AutoModelForCausalLM.from_pretrained(
                    directory, dtype=dtype, use_safetensors=True
                )
                module.to(device)
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise ModelNotFoundError(
                f"transformers cannot load a causal language model from {directory}: {error}",
                model=directory,
            ) from error
        return cls(module, module.get_output_embeddings())

    def first_layers(self) -> FallbackModel:
        """Return the model itself: it promises no bits, and is not checked."""
        return self

    def initial_parameters(self) -> Tensor:
        """Return the base model's weights, in the base model's dtype."""
        first = next(iter(self._parameters.values()))
        flat = torch.zeros(self.full_layout.width, dtype=first.dtype, device=first.device)
        for name, parameter in self._parameters.items():
            self.full_layout.view(flat, name).copy_(parameter)
        return flat

    def bind(self, run: RunTensors | None) -> FallbackWeights:
        """Return the weights of a run, or of the base model."""
        if run is None:
            return FallbackWeights({}, {}, {})
        dtype = next(iter(self._parameters.values())).dtype
        theta_P = run.theta_P.to(dtype)
        if run.is_full:
            leaves = {
                name: view.detach().requires_grad_(run.grad_P is not None)
                for name, view in run.layout.views(theta_P).items()
            }
            grads = {} if run.grad_P is None else run.layout.views(run.grad_P)
            return FallbackWeights({}, leaves, grads)
        loras = {
            spec.names[0]: LoraTarget.of(
                spec,
                run.layout,
                theta_P.view(1, -1),
                None if run.grad_P is None else run.grad_P.view(1, -1),
                run.scale,
            )
            for spec in self.lora_targets
        }
        return FallbackWeights({n: lora for n, lora in loras.items() if lora is not None}, {}, {})

    def head_adapter(self, bound: FallbackWeights, index: int) -> None:
        """Return None: the unembedding is a module among others here."""
        del bound, index

    def score(self, one: Pass[FallbackWeights], *, needs_gradient: bool) -> list[HeadScores]:
        """Score the heads of a pass; with `needs_gradient`, also add to the gradient rows."""
        losses = [group.losses for group in one.heads]
        if not any(loss.is_of_sequence for loss in losses):
            return self._sweep(one, losses, needs_gradient=needs_gradient)
        # Losses of sequences need all scores before anything goes back.
        scores = self._sweep(one, [NoLosses()] * len(losses), needs_gradient=False)
        known = [
            KnownLosses(loss.of_all(found.logprobs))
            for loss, found in zip(losses, scores, strict=True)
        ]
        return self._sweep(one, known, needs_gradient=needs_gradient)

    def _sweep(
        self, one: Pass[FallbackWeights], losses: Sequence[RowLosses], *, needs_gradient: bool
    ) -> list[HeadScores]:
        """Go through the sequences of a pass, those of equal length at a time."""
        device = one.rows.tokens_N.device
        scores = [
            HeadScores(*(torch.zeros(group.targets.shape, device=device) for _ in range(2)))
            for group in one.heads
        ]
        used = {bound.rows.start: bound.bound for bound in one.adapted}
        for segment, sequences in zip(one.rows.segments, one.rows.sequences, strict=True):
            bound = used.get(segment.start, one.weights)
            for rows, num_sequences in _equal_lengths(sequences):
                with torch.set_grad_enabled(needs_gradient):
                    tokens = one.rows.tokens_N[rows].view(num_sequences, -1)
                    logits = self.logits(bound, tokens).flatten(0, 1)
                    log_softmax = torch.log_softmax(logits, -1, dtype=torch.float32)
                chosen, dlogprobs = [], []
                for group, loss, found in zip(one.heads, losses, scores, strict=True):
                    place = _members(group.rows, rows)
                    if place.start == place.stop:
                        continue
                    with torch.set_grad_enabled(needs_gradient):
                        within = group.rows[place] - rows.start
                        logprobs = log_softmax[within].gather(1, group.targets[place])
                    found.logprobs[place] = logprobs.detach()
                    of_rows = loss.of_rows(logprobs.detach(), place)
                    found.loss[place] = of_rows.loss_NK
                    chosen.append(logprobs)
                    dlogprobs.append(of_rows.dlogprobs_NK)
                if needs_gradient and chosen:
                    _add_gradients(bound, chosen, dlogprobs, self._anchor)
        return scores

    def logits(self, bound: FallbackWeights, tokens_BT: Tensor) -> Tensor:
        """Return logits [B, T, V] of sequences of equal length."""
        arguments: dict[str, Any] = {"input_ids": tokens_BT, "use_cache": False}
        if bound.parameters:
            output = torch.func.functional_call(
                self._module, dict(bound.parameters), (), arguments, tie_weights=True
            )
        else:
            with self._adapted(bound.adapters):
                output = self._module(**arguments)
        logits: Tensor = output.logits
        return logits

    @contextmanager
    def _adapted(self, adapters: Mapping[str, LoraTarget]) -> Iterator[None]:
        self._adapters = adapters
        try:
            yield
        finally:
            self._adapters = {}

    def _hook(self, name: str) -> Any:
        def add_adapter(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            lora = self._adapters.get(name)
            if lora is None:
                return output
            added: Tensor = _AddLora.apply(  # type: ignore[no-untyped-call]
                output, inputs[0], self._anchor, lora
            )
            return added

        return add_adapter


class _AddLora(torch.autograd.Function):
    """`y + scale B A x`, whose backward adds the gradients of A and B to the run's row."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, anchor: Tensor, lora: LoraTarget) -> Tensor:
        del anchor
        flat = x.flatten(0, -2).contiguous()
        out = y.clone()
        projected = lora.add_forward_(out.view(-1, y.shape[-1]), flat, WHOLE)
        ctx.save_for_backward(flat, projected)
        ctx.lora, ctx.input_shape = lora, x.shape
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        flat, projected = ctx.saved_tensors
        dx = torch.zeros_like(flat) if ctx.needs_input_grad[1] else None
        ctx.lora.backward(dy.flatten(0, -2).contiguous(), flat, projected, dx, WHOLE)
        return dy, None if dx is None else dx.view(ctx.input_shape), None, None


def _add_gradients(
    bound: FallbackWeights,
    logprobs: Sequence[Tensor],
    dlogprobs: Sequence[Tensor],
    anchor: Tensor,
) -> None:
    if not bound.parameters:
        torch.autograd.grad(logprobs, [anchor], dlogprobs, allow_unused=True)
        return
    names = list(bound.parameters)
    grads = torch.autograd.grad(
        logprobs, [bound.parameters[name] for name in names], dlogprobs, allow_unused=True
    )
    for name, grad in zip(names, grads, strict=True):
        if grad is not None:
            bound.parameter_grads[name].add_(grad)


def _equal_lengths(sequences: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, int]]:
    """Yield the packed rows and number of neighbouring sequences of equal length."""
    for length, group in groupby(sequences, key=lambda one: one[1]):
        firsts = [first for first, _ in group]
        yield slice(firsts[0], firsts[-1] + length), len(firsts)


def _members(rows: Tensor, wanted: slice) -> slice:
    """Return which of ascending rows lie in a slice of packed rows."""
    bounds = torch.tensor([wanted.start, wanted.stop], device=rows.device)
    first, last = torch.searchsorted(rows, bounds).tolist()
    return slice(first, last)


def _has_experts(module: nn.Module) -> bool:
    config: Any = module.config
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in _NUM_EXPERTS)


def _unreachable_experts(module: nn.Module) -> list[str]:
    """Return the modules that hold the matrices of all their experts as one tensor [E, ., .]."""
    if not _has_experts(module):
        return []
    return [
        name
        for name, part in module.named_modules()
        if any(own.dim() == _FUSED_DIM for own in part.parameters(recurse=False))
        and not isinstance(part, nn.modules.conv._ConvNd)
    ]


def _unreachable_layers(module: nn.Module) -> dict[str, str]:
    """Return the first layer of each kind that multiplies, and that no adapter reaches.

    GPT-2 and its kin have a class of their own for linear layers, with the matrix transposed.
    """
    from transformers.pytorch_utils import Conv1D

    found: dict[str, str] = {}
    for name, part in module.named_modules():
        if isinstance(part, Conv1D):
            found.setdefault(_kind(name), name)
    return found


def _kind(module_path: str) -> str:
    return "attention" if "attn" in module_path or "attention" in module_path else "mlp"
