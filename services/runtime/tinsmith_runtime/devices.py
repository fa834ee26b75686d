"""Which device and dtype `auto` stands for: a pure function of what the machine has.

An idle GPU beside a CPU that computes costs days before it is noticed. So every choice that leaves
one out comes with a warning which says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_runtime.errors import ConfigError

AUTO = "auto"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a process sees.

    Attributes:
        gpus: Names of the GPUs that torch can use, by index.
        has_bfloat16: Whether they compute in bfloat16.
        num_driver_gpus: GPUs of the machine's driver, also those that torch was not built for.
    """

    gpus: tuple[str, ...] = ()
    has_bfloat16: bool = False
    num_driver_gpus: int = 0


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where and in which precision a base model computes.

    Attributes:
        device: A torch device.
        dtype: Of the base model.
        device_name: The same for people, such as `cuda:0 NVIDIA H200`.
        warning: What a user should know; empty if nothing.
    """

    device: str
    dtype: str
    device_name: str
    warning: str = ""

    def __str__(self) -> str:
        return f"{self.device_name}, {self.dtype}"


def check_device(device: str) -> None:
    """Raise ConfigError unless the setting is `auto`, `cpu`, `cuda` or `cuda:N`."""
    kind, separator, index = device.partition(":")
    is_index = index.isascii() and index.isdigit()
    if device in (AUTO, "cpu", "cuda") or (kind == "cuda" and separator and is_index):
        return
    raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")


def check_dtype(dtype: str) -> None:
    """Raise ConfigError unless the setting is `auto` or a dtype of base models."""
    if dtype not in (AUTO, *DTYPES):
        raise ConfigError(f"dtype must be {AUTO}, {' or '.join(DTYPES)}, got {dtype!r}")


def choose_device(device: str, dtype: str, hardware: Hardware) -> DeviceChoice:
    """Return what two settings mean on a machine.

    `auto` is the GPU where torch can use one, and then bfloat16 if it computes in that; else the
    CPU and float32. A dtype of `auto` follows the device, however that was chosen.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: `auto`, `float32` or `bfloat16`.
        hardware: What the process sees.

    Raises:
        ConfigError: If a setting has another value, or the GPU is not there.
    """
    check_device(device)
    check_dtype(dtype)
    gpus = hardware.gpus
    if device == AUTO:
        device = "cuda" if gpus else "cpu"
        warning = _of_unusable(hardware) if not gpus else ""
    elif device == "cpu":
        warning = (
            f"computing on the CPU although there is a GPU ({gpus[0]}); --device auto, or"
            " device=auto in the settings, takes it"
            if gpus
            else ""
        )
    else:
        warning = ""
    if device == "cpu":
        return DeviceChoice("cpu", "float32" if dtype == AUTO else dtype, "cpu", warning)
    index = int(device.partition(":")[2] or 0)
    if index >= len(gpus):
        seen = ", ".join(f"cuda:{number} {name}" for number, name in enumerate(gpus))
        why = f"torch sees {seen}" if gpus else _of_unusable(hardware) or "torch sees no GPU"
        raise ConfigError(f"device {device} is not there: {why}")
    if dtype == AUTO:
        dtype = "bfloat16" if hardware.has_bfloat16 else "float32"
    return DeviceChoice(device, dtype, f"cuda:{index} {gpus[index]}", warning)


def _of_unusable(hardware: Hardware) -> str:
    """Return why the GPUs of the driver are not used; empty if it has none."""
    if not hardware.num_driver_gpus:
        return ""
    return (
        f"this machine has {hardware.num_driver_gpus} GPU(s) that this build of torch cannot use;"
        " install torch with CUDA to compute there"
    )
