"""Amounts of CPU, memory and GPUs, as Kubernetes writes them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Self

GPU_RESOURCE = "nvidia.com/gpu"
GIB = 2**30

_QUANTITY = re.compile(r"^([+-]?(?:\d+(?:\.\d*)?|\.\d+))([eE][+-]?\d{1,3}|[numkMGTPE]|[KMGTPE]i)?$")
_FACTORS = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    **{f"{unit}i": Decimal(2 ** (10 * power)) for power, unit in enumerate("KMGTPE", 1)},
}
_LONGEST = 64


class QuantityError(ValueError):
    """A text is no quantity."""


def parse_quantity(value: object) -> Decimal:
    """Return an amount such as `500m`, `4Gi` or 2.

    Raises:
        QuantityError: If it is none.
    """
    text = str(value).strip()
    if len(text) > _LONGEST or isinstance(value, bool):
        raise _refusal(text)
    return _parsed(text)


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> Decimal:
    """Return the amount that a text means; nodes and pods of a cluster write the same few."""
    match = _QUANTITY.match(text)
    if match is None:
        raise _refusal(text)
    number, suffix = match.group(1), match.group(2) or ""
    if suffix[:1] in "eE" and len(suffix) > 1:
        return Decimal(number + suffix)
    return Decimal(number) * _FACTORS[suffix]


def _refusal(text: str) -> QuantityError:
    return QuantityError(f"{text[:_LONGEST]!r} is not a quantity such as 500m, 2 or 4Gi")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a pod asks for, or a node has.

    Attributes:
        cpu_milli: Thousandths of a core.
        memory_bytes: Bytes.
        gpus: Whole GPUs.
        pods: Places for pods: 1 for a pod.
    """

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    pods: int = 0

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            self.cpu_milli + other.cpu_milli,
            self.memory_bytes + other.memory_bytes,
            self.gpus + other.gpus,
            self.pods + other.pods,
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(
            self.cpu_milli - other.cpu_milli,
            self.memory_bytes - other.memory_bytes,
            self.gpus - other.gpus,
            self.pods - other.pods,
        )

    def fits_in(self, free: Resources) -> bool:
        """Whether this much is free; what is not asked for may be overdrawn."""
        return (
            (not self.cpu_milli or self.cpu_milli <= free.cpu_milli)
            and (not self.memory_bytes or self.memory_bytes <= free.memory_bytes)
            and (not self.gpus or self.gpus <= free.gpus)
            and (not self.pods or self.pods <= free.pods)
        )

    @classmethod
    def parse(cls, amounts: dict[str, object], *, pods: int | None = None) -> Self:
        """Return the amounts of a map such as `{"cpu": "4", "memory": "16Gi"}`.

        Args:
            amounts: By name of the resource; those that the controller does not count are left out.
            pods: Places for pods, unless the map says it.

        Raises:
            QuantityError: If an amount is none, or negative.
        """

        def amount(name: str, factor: int) -> int:
            value = parse_quantity(amounts.get(name, 0)) * factor
            if value < 0:
                raise QuantityError(f"{name} is negative")
            return int(value.to_integral_value(rounding="ROUND_CEILING"))

        return cls(
            cpu_milli=amount("cpu", 1000),
            memory_bytes=amount("memory", 1),
            gpus=amount(GPU_RESOURCE, 1),
            pods=amount("pods", 1) if pods is None else pods,
        )
