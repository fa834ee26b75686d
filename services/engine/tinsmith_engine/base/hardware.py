"""What torch and the driver see of the machine, and settings made concrete by it."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any, TypeVar

import torch

from tinsmith_runtime.devices import DeviceChoice, Hardware, choose_device

logger = logging.getLogger(__name__)


ConfigT = TypeVar("ConfigT", bound=Any)


def visible_hardware() -> Hardware:
    """Return the GPUs of this process. One that the user hid is not counted as the driver's."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    return Hardware(
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(num_gpus)),
        has_bfloat16=bool(num_gpus) and torch.cuda.is_bf16_supported(),
        num_driver_gpus=0 if is_hidden else len(list(Path("/dev").glob("nvidia[0-9]*"))),
    )


def device_choice_of(config: Any) -> DeviceChoice:
    """Return where a trainer or sampler with these settings computes.

    Raises:
        ConfigError: If the device is not there.
    """
    return choose_device(config.device, config.dtype, visible_hardware())


def placed(config: ConfigT) -> ConfigT:
    """Return settings of a trainer or sampler in which nothing of device and dtype is `auto`.

    Logs the choice, as a warning where a GPU is left out.

    Raises:
        ConfigError: If the device is not there.
    """
    choice = device_choice_of(config)
    fields = {"device": choice.device_name, "dtype": choice.dtype}
    if choice.warning:
        logger.warning(choice.warning, extra=fields)
    else:
        logger.info("device chosen", extra=fields)
    chosen: ConfigT = dataclasses.replace(config, device=choice.device, dtype=choice.dtype)
    return chosen
