"""What a model takes of each GPU at least, where the sizes of its publisher are known."""

from __future__ import annotations

import functools
from dataclasses import replace

from tinsmith.planning.devices import GPUS
from tinsmith.planning.estimate import Workload, estimate
from tinsmith.planning.known_models import KNOWN_MODELS
from tinsmith_jobs.spec import FULL, SAMPLER, TRAINER, JobSpec, PoolSpec, Role

_ANY_GPU = GPUS["h100"]
"""Of a device, bytes of weights depend on the dtype alone."""


def least_gpu_bytes(spec: JobSpec | PoolSpec, role: Role) -> int:
    """Return the bytes that each GPU of a role's pods holds at least; 0 if that is not known.

    Weights count, and in trainers what is trained of them with its gradient and moments. What
    depends on the batches does not. `tinsmith plan` estimates it with the rest.
    """
    model = spec.model_of(role)
    if model is None or not role.gpus or role.kind not in (TRAINER, SAMPLER):
        return 0
    adapter = spec.adapter_of(role)
    rank = 0 if adapter.type == FULL else adapter.rank
    dtype = "float32" if model.dtype == "float32" else "bfloat16"
    weights, trained = _sizes(model.source.removeprefix("hf://"), rank, dtype)
    held = weights + (trained if role.kind == TRAINER else 0)
    return held // (role.gpus * (role.replicas if spec.is_group(role) else 1))


@functools.lru_cache(maxsize=1024)
def _sizes(model: str, rank: int, dtype: str) -> tuple[int, int]:
    shape = KNOWN_MODELS.get(model)
    if shape is None:
        return 0, 0
    found = estimate(shape, Workload(rank=rank), replace(_ANY_GPU, dtype=dtype))
    return found.weights_bytes, found.run_bytes
