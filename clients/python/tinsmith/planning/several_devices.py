"""Which models run on several devices of one pod: one table for plans, jobs, pools and trainers.

What cannot is refused where the family is first known. A job or pool tells it by a repository of
its publisher, `tinsmith plan` by the model's files. A trainer reads those before any weights.
"""

from __future__ import annotations

import enum
import re

SHARDED_FAMILIES = ("llama", "qwen2", "qwen3")
"""Types of models whose base the ranks of a trainer keep in parts."""
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")

_PUBLISHED = (
    (re.compile(r"hf://Qwen/Qwen3-VL-\d+B-A\d+B\b"), "qwen3_vl_moe"),
    (re.compile(r"hf://Qwen/Qwen3-VL-"), "qwen3_vl"),
    (re.compile(r"hf://Qwen/Qwen2\.5-VL-"), "qwen2_5_vl"),
    (re.compile(r"hf://Qwen/Qwen2-VL-"), "qwen2_vl"),
    (re.compile(r"hf://Qwen/Qwen3-(?:Coder-)?\d+B-A\d+B\b"), "qwen3_moe"),
)
"""Repositories whose publisher puts into the name that a model has experts or reads images."""


class Work(enum.Enum):
    """What the devices of a pod do together."""

    ADAPTERS = "trains adapters"
    FULL = "trains all weights"
    EMBEDDED = "samples by engine embedded"
    VLLM = "samples by engine vllm"


def published_family(source: str) -> str:
    """Return the type of a model of a hub by its name; empty where the name does not tell it."""
    return next((family for name, family in _PUBLISHED if name.match(source)), "")


def refusal(work: Work, family: str, num_devices: int) -> str:
    """Return why a pod cannot use its devices, and what to do; empty if it can.

    Args:
        work: What it does.
        family: The model's type, as `model_type` in its configuration; empty if it is not known.
        num_devices: Devices of one pod.
    """
    if num_devices <= 1:
        return ""
    if work is Work.EMBEDDED:
        return (
            f"the embedded engine samples on one device, and {num_devices} would be paid for; take "
            "engine vllm, which cuts a model over them, or one device and more replicas"
        )
    if work is Work.ADAPTERS and family and family not in SHARDED_FAMILIES:
        return (
            f"adapters of a model of the type {family} are trained on one device: only bases of "
            f"the types {', '.join(SHARDED_FAMILIES)} are kept in parts. Take one device that "
            "holds it, and more replicas for more runs"
        )
    if work is Work.VLLM and family in VISION_FAMILIES:
        return (
            f"a model of the type {family} reads images, which engine vllm refuses; take engine "
            "embedded and one device that holds it"
        )
    return ""
