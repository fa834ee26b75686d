"""Memory and time of a training, counted from the shape of its model.

Memory is what the engine allocates: weights; four float32 rows for what is trained (weights,
gradient, two moments); activations that the backward needs, of one pass; logits of the rows that
are scored at a time; keys and values of the sequences that are sampled. On a CPU, interpreter and
libraries lie in the same memory, and count. Time is that of the
products, over the share of the device's rate that training reaches. Forward, each active weight
takes 2 floating-point operations for each token. The gradient of the activations takes 2 more, and
that of the weights 2 more where all of them are trained (Kaplan et al. 2020, arXiv:2001.08361,
section 2.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tinsmith.errors import ConfigurationError
from tinsmith.planning.devices import Device
from tinsmith.planning.model_shape import ModelShape

_BYTES = {"float32": 4, "bfloat16": 2}
_MASTER_BYTES = 4
_ROWS_OF_A_RUN = 4
"""Weights, gradient and two moments."""
_MICRO_BATCH_TOKENS = {"float32": 512, "bfloat16": 2048}
"""Tokens of a pass of one run: the engine's defaults on a CPU and on a GPU."""
# The engine's chunks of the unembedding, `lm_head.chunk_rows`, which the client cannot import.
_LOGIT_NUMBERS = 40 << 20
_FEWEST_LOGIT_ROWS, _MOST_LOGIT_ROWS = 32, 256
_USABLE_SHARE = 0.9
"""Of a device's memory: the rest is the allocator's and the runtime's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is to be trained.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    rank: int = 32
    """Of the adapter; 0 trains all weights."""
    num_sequences: int = 32
    """Of a step."""
    sequence_tokens: int = 512
    num_steps: int = 100
    num_runs: int = 1
    """Runs that are resident at a time."""
    sampled_tokens: int = 0
    """Tokens of a step that are sampled, as in reinforcement learning; 0 samples none."""

    def __post_init__(self) -> None:
        for name, least in (
            ("rank", 0),
            ("num_sequences", 1),
            ("sequence_tokens", 2),
            ("num_steps", 1),
            ("num_runs", 1),
            ("sampled_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)}", remedy=f"give {least} or more"
                )

    @property
    def step_tokens(self) -> int:
        """Tokens that a step trains on."""
        return self.num_sequences * self.sequence_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a training takes; bytes and seconds."""

    weights_bytes: int
    run_bytes: int
    """Of all resident runs: weights that are trained, gradients and moments."""
    activation_bytes: int
    logit_bytes: int
    process_bytes: int
    """Of interpreter and libraries, where they lie in the device's memory."""
    cache_bytes: int
    """Keys and values of the sequences that are sampled at a time."""
    num_devices: int
    """Devices for the trainer, so that it fits."""
    num_sampler_devices: int
    """Devices for a sampler; 0 without sampling."""
    step_s: float
    training_s: float

    @property
    def trainer_bytes(self) -> int:
        """Memory of the trainer, over all its devices."""
        held = self.weights_bytes + self.run_bytes + self.activation_bytes + self.logit_bytes
        return held + self.process_bytes


def estimate(shape: ModelShape, work: Workload, device: Device) -> Estimate:
    """Return what a training takes.

    Args:
        shape: Of the base model.
        work: What is trained.
        device: What it is computed on.
    """
    number_bytes = _BYTES[device.dtype]
    is_full = work.rank == 0
    trained = shape.num_parameters if is_full else shape.num_adapter_parameters(work.rank)
    weights_bytes = shape.num_parameters * number_bytes
    run_bytes = trained * _MASTER_BYTES * _ROWS_OF_A_RUN * work.num_runs
    pass_tokens = min(
        work.step_tokens, max(_MICRO_BATCH_TOKENS[device.dtype], work.sequence_tokens)
    )
    activation_bytes = pass_tokens * _kept_per_token(shape, work.rank) * number_bytes
    logit_bytes = _logit_bytes(shape, pass_tokens, number_bytes)
    cached = work.num_sequences * work.sequence_tokens if work.sampled_tokens else 0
    cache_bytes = cached * shape.kv_numbers_per_token * number_bytes
    usable = device.memory_bytes * _USABLE_SHARE
    held_bytes = weights_bytes + run_bytes + activation_bytes + logit_bytes
    num_devices = math.ceil((held_bytes + device.process_bytes) / usable)
    sampler_bytes = weights_bytes + cache_bytes if work.sampled_tokens else 0
    num_sampler_devices = math.ceil(sampler_bytes / usable)
    products = 3 if is_full else 2
    flops = 2 * products * shape.num_active_parameters * work.step_tokens
    flops += _attention_flops(shape, work) * products
    rate = device.flops_per_s * device.share_of_peak * num_devices
    step_s = flops / rate
    if work.sampled_tokens:
        step_s += _sampling_s(shape, work, device, num_sampler_devices)
    return Estimate(
        weights_bytes=weights_bytes,
        run_bytes=run_bytes,
        activation_bytes=activation_bytes,
        logit_bytes=logit_bytes,
        process_bytes=device.process_bytes,
        cache_bytes=cache_bytes,
        num_devices=num_devices,
        num_sampler_devices=num_sampler_devices,
        step_s=step_s,
        training_s=step_s * work.num_steps,
    )


def logit_rows(vocab_size: int) -> int:
    """Return how many tokens have logits at a time, at most."""
    return max(_FEWEST_LOGIT_ROWS, min(_MOST_LOGIT_ROWS, _LOGIT_NUMBERS // vocab_size))


def _logit_bytes(shape: ModelShape, pass_tokens: int, number_bytes: int) -> int:
    """Return what the logits of a chunk take.

    They are float32, and once more in the dtype of the base where that is another one.
    """
    rows = min(logit_rows(shape.vocab_size), pass_tokens)
    others = 0 if number_bytes == _MASTER_BYTES else number_bytes
    return rows * shape.vocab_size * (_MASTER_BYTES + others)


def _kept_per_token(shape: ModelShape, rank: int) -> int:
    """Return the numbers that the backward keeps for a token, of all layers.

    By layer: input, its norm, middle and its norm; q, k and v as projected and as attention has
    them, what was attended twice; gate and up; and what the adapters' products need.
    """
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    attention = 4 * shape.hidden_size + 4 * queries + 3 * keys
    adapters = 4 * rank
    dense = shape.num_layers - shape.num_expert_layers
    mlps = dense * 2 * shape.intermediate_size
    mlps += shape.num_expert_layers * shape.num_chosen_experts * 2 * shape.expert_size
    return shape.num_layers * (attention + adapters) + mlps


def _attention_flops(shape: ModelShape, work: Workload) -> int:
    """Return the operations of the scores and of the weighted values, causal, forward."""
    pairs = work.num_sequences * work.sequence_tokens**2 // 2
    return 2 * 2 * shape.num_layers * shape.num_heads * shape.head_dim * pairs


def _sampling_s(shape: ModelShape, work: Workload, device: Device, num_devices: int) -> float:
    """Return the time of drawing a step's tokens: products, at a low share of the rate.

    Decoding reads all weights for each token of the longest sequence; below some hundred sequences
    that reading is what takes the time, which a share of a tenth of training's stands for.
    """
    flops = 2 * shape.num_active_parameters * work.sampled_tokens
    return flops / (device.flops_per_s * device.share_of_peak * 0.1 * num_devices)
