"""What a device needs before it computes, so that the same work gives the same bits."""

from __future__ import annotations

import os

import torch

from tinsmith_runtime.errors import ConfigError

# cuBLAS keeps its order of additions only with a workspace of fixed size, which it reads once.
_CUBLAS_WORKSPACE = ":4096:8"


def prepare_device(device: str) -> torch.device:
    """Return a device, ready to compute.

    On a GPU some kernels add in an order of their own: atomics, in the backward of attention or
    of an embedding. They are replaced by deterministic ones, and float32 stays float32.

    Raises:
        ConfigError: There is no such device.
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not one that torch knows") from error
    if place.type == "cpu":
        return place
    if place.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} is not available to this build of torch")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return place
