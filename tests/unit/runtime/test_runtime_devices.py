"""What `auto` means on which machine, and when a GPU that is left out is mentioned."""

from __future__ import annotations

import pytest

from tinsmith_runtime.devices import Hardware, check_device, check_dtype, choose_device
from tinsmith_runtime.errors import ConfigError

NONE = Hardware()
H200S = Hardware(("NVIDIA H200", "NVIDIA H200"), has_bfloat16=True, num_driver_gpus=2)
OLD = Hardware(("Tesla P40",), has_bfloat16=False, num_driver_gpus=1)
CPU_TORCH = Hardware(num_driver_gpus=8)


@pytest.mark.parametrize(
    ("device", "dtype", "hardware", "wanted"),
    [
        pytest.param("auto", "auto", NONE, "cpu, float32", id="laptop"),
        pytest.param("auto", "auto", H200S, "cuda:0 NVIDIA H200, bfloat16", id="gpu"),
        pytest.param("auto", "auto", OLD, "cuda:0 Tesla P40, float32", id="gpu-without-bfloat16"),
        pytest.param("auto", "float32", H200S, "cuda:0 NVIDIA H200, float32", id="dtype-given"),
        pytest.param("cuda:1", "auto", H200S, "cuda:1 NVIDIA H200, bfloat16", id="second-gpu"),
        pytest.param("cpu", "auto", H200S, "cpu, float32", id="cpu-wanted"),
        pytest.param("cpu", "bfloat16", NONE, "cpu, bfloat16", id="cpu-bfloat16"),
    ],
)
def test_where_a_model_computes(device: str, dtype: str, hardware: Hardware, wanted: str) -> None:
    assert str(choose_device(device, dtype, hardware)) == wanted


def test_the_device_of_torch_is_kept_as_it_was_written() -> None:
    assert choose_device("cuda:1", "auto", H200S).device == "cuda:1"
    # Of several processes each takes a GPU of its own.
    assert (
        choose_device("auto", "auto", H200S).device
        == choose_device("cuda", "auto", H200S).device
        == "cuda"
    )


@pytest.mark.parametrize(
    ("device", "hardware", "says"),
    [
        pytest.param("cpu", H200S, "although there is a GPU (NVIDIA H200)", id="left-out"),
        pytest.param("auto", CPU_TORCH, "8 GPU(s) that this build of torch", id="torch-for-cpu"),
        pytest.param("auto", H200S, "", id="used"),
        pytest.param("auto", NONE, "", id="none-to-use"),
        pytest.param("cpu", NONE, "", id="none-to-leave-out"),
    ],
)
def test_a_gpu_is_never_left_out_in_silence(device: str, hardware: Hardware, says: str) -> None:
    warning = choose_device(device, "auto", hardware).warning
    assert says in warning
    assert bool(warning) == bool(says)


@pytest.mark.parametrize(
    ("device", "hardware", "says"),
    [
        pytest.param("cuda:2", H200S, "cuda:2 is not there: torch sees cuda:0 NVIDIA H200", id="2"),
        pytest.param("cuda", NONE, "torch sees no GPU", id="none"),
        pytest.param("cuda", CPU_TORCH, "install torch with CUDA", id="torch-for-cpu"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(device: str, hardware: Hardware, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose_device(device, "auto", hardware)


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "mps"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="auto, cpu, cuda or cuda:N"):
        check_device(device)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="auto, float32 or bfloat16, got 'float16'"):
        check_dtype("float16")
