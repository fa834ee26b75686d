"""A model that is trained in full, sharded by FSDP2 over all ranks.

The transformers module as it is, `fully_shard`ed by layer: parameters, gradients and moments are
float32 DTensors of which each rank keeps a part; where the base model is bfloat16, FSDP gathers and
computes in bfloat16 and reduces gradients in float32. FSDP divides gradients by the number of
ranks, as for a loss that is a mean. Ours are sums, so the division is turned off.

Sequences of equal length run as one batch without padding (as in `hf_fallback`). Such a batch is a
*group*; groups are dealt to the ranks in turns, in the order of the batch. The split depends on
the operation and the number of ranks alone. Gathering and reducing are collective: a rank that
has
no group in a round computes one token and sends back zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.distributed.fsdp_loading import load_sharded
from tinsmith_engine.distributed.process_group import Ranks
from tinsmith_engine.losses.losses import TokenLoss
from tinsmith_engine.model.lm_head import RowLosses
from tinsmith_runtime.errors import ModelNotFoundError


class ShardedModule:
    """The parameters of one run, and passes through them; all ranks call each method together.

    Args:
        directory: Of the base model, whose weights the run starts from.
        layout: Names and shapes of all weights.
        dtype: What passes compute in.
        ranks: All ranks.

    Raises:
        ModelNotFoundError: transformers cannot build a causal language model from the directory.
    """

    def __init__(
        self, directory: Path, layout: ParameterLayout, dtype: torch.dtype, ranks: Ranks
    ) -> None:
        self._ranks = ranks
        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
        )
        self._module = load_sharded(
            directory, lambda module: _shard(module, mesh, policy), ranks.device
        )
        self.parameters: dict[str, DTensor] = {}
        for name, parameter in self._module.named_parameters():
            if name not in layout or not isinstance(parameter, DTensor):
                raise ModelNotFoundError(f"weight {name} of {directory} has no place in a run")
            self.parameters[name] = parameter

    def score(
        self,
        tokens_BT: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        losses: RowLosses | None,
        *,
        others: tuple[Tensor, Tensor],
        needs_gradient: bool,
    ) -> tuple[tuple[Tensor, TokenLoss] | None, Tensor | None]:
        """Score one group of this rank and, if asked, add to the gradients.

        Args:
            tokens_BT: Sequences of equal length; None if this rank only helps the others.
            rows: Which of the B * T tokens are scored, int64 [M].
            targets: Their targets, int64 [M, K].
            losses: Their losses; None if nothing has one.
            others: Rows and targets of the tokens without a loss.
            needs_gradient: Whether to go back.

        Returns:
            Log-probabilities and losses [M, K], or None without any; and log-probabilities of the
            others, or None without any.
        """
        device = self._ranks.device
        if tokens_BT is None:
            tokens_BT = torch.zeros(1, 1, dtype=torch.int64)
        with torch.set_grad_enabled(needs_gradient):
            logits: Tensor = self._module(
                input_ids=tokens_BT.to(device), use_cache=False
            ).logits.flatten(0, 1)
            unlossed = None
            if len(others[0]):
                unlossed = _chosen(logits.detach(), others[0].to(device), others[1].to(device))
            if losses is None:
                if needs_gradient:
                    torch.autograd.backward(logits, torch.zeros_like(logits))
                return None, unlossed
            logprobs = _chosen(logits, rows.to(device), targets.to(device))
        found = logprobs.detach()
        loss = losses.of_all(found)
        if needs_gradient:
            torch.autograd.backward(logprobs, loss.dlogprobs_NK)
        return (found, loss), unlossed

    def locals_of(self, tensors: Mapping[str, DTensor]) -> list[Tensor]:
        """Return this rank's parts of tensors, without empty ones, in the order of the weights."""
        parts = [local_part(tensors[name]) for name in self.parameters]
        return [part for part in parts if part.numel()]

    @property
    def gradients(self) -> dict[str, DTensor]:
        """The gradients that were accumulated; zeros where a weight was not reached."""
        found = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not isinstance(parameter.grad, DTensor):
                raise TypeError(f"the gradient of {name} is not sharded")
            found[name] = parameter.grad
        return found

    def clear_gradients(self) -> None:
        """Free the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None


def _chosen(logits: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities of the targets of some rows, float32 [M, K]."""
    return torch.log_softmax(logits[rows], -1, dtype=torch.float32).gather(1, targets)


def local_part(tensor: DTensor) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory."""
    # Operations on a DTensor are typed as if they returned plain tensors.
    part: Tensor = cast(DTensor, tensor.detach()).to_local()
    return part


def whole_tensor(tensor: DTensor) -> Tensor:
    """Gather a tensor; all ranks get it."""
    whole: Tensor = cast(DTensor, tensor.detach()).full_tensor()
    return whole


def zeros_like(tensors: Mapping[str, DTensor]) -> dict[str, DTensor]:
    """Return zeros that are sharded as other tensors are."""
    return {
        name: cast(DTensor, torch.zeros_like(tensor.detach())) for name, tensor in tensors.items()
    }


def take_part_(tensor: DTensor, whole: Tensor, ranks: Ranks) -> None:
    """Overwrite this rank's part of a tensor from the whole of it."""
    size = -(-whole.shape[0] // ranks.world_size)
    mine = whole[ranks.rank * size : (ranks.rank + 1) * size]
    part = local_part(tensor)
    if part.shape != mine.shape:
        raise ValueError(f"this rank's part is {list(part.shape)}, expected {list(mine.shape)}")
    part.copy_(mine)


def groups_of(
    lengths: Sequence[int], num_targets: Sequence[int], microbatch: Sequence[int]
) -> list[list[int]]:
    """Part a microbatch into groups: neighbours of equal length with as many targets."""
    groups: list[list[int]] = []
    for index in microbatch:
        last = groups[-1][-1] if groups else None
        if last is not None and (lengths[last], num_targets[last]) == (
            lengths[index],
            num_targets[index],
        ):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard a transformers model by layer, so that its gradients are sums over the ranks."""
    layer_classes = set(getattr(module, "_no_split_modules", None) or ())
    for part in list(module.modules()):
        if type(part).__name__ in layer_classes:
            fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # gloo has no premultiplied sum, and NCCL's would cost a kernel of its own.
            part.set_force_sum_reduction_for_comms(True)
