"""What a device holds and computes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tinsmith.errors import ConfigurationError

_CPU_NUMBERS = 1024
_CPU_REPEATS = 5
_CPU_PROCESS_BYTES = 460 * 2**20
"""Python, torch, and buffers of the libraries for products, once large ones were computed."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device as a data sheet has it, or as it was measured."""

    name: str
    memory_bytes: int
    flops_per_s: float
    """Dense products in the dtype of the base model."""
    dtype: str
    share_of_peak: float
    """Share of that rate which a training step reaches."""
    process_bytes: int = 0
    """Of the memory, what interpreter and libraries hold; not of a GPU's, see `_USABLE_SHARE`."""


def _gpu(name: str, memory_gb: int, teraflops: float) -> Device:
    # A third of the peak: what packed LoRA training of dense models reaches at a few thousand
    # tokens. It is the coarsest number here; a measured step is better.
    return Device(name, memory_gb * 10**9, teraflops * 1e12, "bfloat16", 0.35)


GPUS = {
    gpu.name: gpu
    for gpu in (
        # Dense bfloat16 rates of NVIDIA's data sheets, without sparsity.
        _gpu("b200", 180, 2250),
        _gpu("h200", 141, 989),
        _gpu("h100", 80, 989),
        _gpu("a100", 80, 312),
        _gpu("l40s", 48, 362),
        _gpu("l4", 24, 121),
    )
}


def find_device(name: str) -> Device:
    """Return a device by name; `cpu` is this machine, measured for a moment.

    Raises:
        ConfigurationError: If it is not known.
    """
    if name == "cpu":
        return measure_cpu()
    if name not in GPUS:
        raise ConfigurationError(
            f"the device {name} is not known", remedy=f"name one of cpu, {', '.join(GPUS)}"
        )
    return GPUS[name]


def measure_cpu(clock: Callable[[], float] = time.perf_counter) -> Device:
    """Return this machine: its memory, and the rate of float32 products on all its cores.

    Args:
        clock: Counts seconds. `time.thread_time` leaves out what other processes take, and is right
            where products have one thread.
    """
    left = np.ones((_CPU_NUMBERS, _CPU_NUMBERS), dtype=np.float32)
    times_s = []
    for _ in range(_CPU_REPEATS):
        begin_s = clock()
        np.matmul(left, left)
        times_s.append(clock() - begin_s)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Exact passes, norms, attention and the optimizer take the rest. `make bench-plan` found shares
    # of 0.68 and 0.77 on one core.
    return Device(
        "cpu",
        memory_bytes,
        2 * _CPU_NUMBERS**3 / min(times_s),
        "float32",
        0.7,
        _CPU_PROCESS_BYTES,
    )
