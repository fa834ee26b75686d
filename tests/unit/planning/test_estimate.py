"""What an estimate depends on, and in which direction."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.sdk.test_cli import invoke

import tinsmith
from tinsmith.planning.devices import GPUS, Device, find_device
from tinsmith.planning.estimate import Workload, estimate, logit_rows
from tinsmith.planning.model_shape import ModelShape
from tinsmith_engine.model.lm_head import chunk_rows
from tinsmith_engine.products.split_products import ROW_TILE
from tinsmith_local.random_shapes import SHAPES

SMALL = ModelShape.of(SHAPES["smollm2-135m"])
LARGE = ModelShape.of(SHAPES["qwen2.5-1.5b"])
CPU = Device("cpu", 25 * 10**9, 1e11, "float32", 0.5)

workloads = st.builds(
    Workload,
    rank=st.integers(0, 128),
    num_sequences=st.integers(1, 256),
    sequence_tokens=st.integers(2, 8192),
    num_steps=st.integers(1, 1000),
    num_runs=st.integers(1, 64),
    sampled_tokens=st.integers(0, 100_000),
)


@given(work=workloads, device=st.sampled_from([CPU, *GPUS.values()]))
def test_more_of_anything_never_takes_less(work: Workload, device: Device) -> None:
    base = estimate(SMALL, work, device)
    assert base.trainer_bytes <= device.memory_bytes * base.num_devices
    assert base.training_s == pytest.approx(base.step_s * work.num_steps)
    for name in ("num_sequences", "sequence_tokens", "num_runs"):
        more = estimate(SMALL, dataclasses.replace(work, **{name: getattr(work, name) * 2}), device)
        assert more.trainer_bytes >= base.trainer_bytes
        assert more.step_s * more.num_devices >= base.step_s * base.num_devices * 0.999
    assert estimate(LARGE, work, device).trainer_bytes > base.trainer_bytes


def test_all_weights_take_sixteen_bytes_each_and_an_adapter_few() -> None:
    full = estimate(LARGE, Workload(rank=0), GPUS["h100"])
    adapter = estimate(LARGE, Workload(rank=32), GPUS["h100"])
    assert full.run_bytes == 16 * LARGE.num_parameters
    assert adapter.run_bytes < full.run_bytes / 10
    assert full.weights_bytes == adapter.weights_bytes == 2 * LARGE.num_parameters


@given(vocab_size=st.integers(1_000, 500_000))
def test_logits_are_those_of_the_chunks_of_the_engine(vocab_size: int) -> None:
    assert logit_rows(vocab_size) // ROW_TILE * ROW_TILE == chunk_rows(vocab_size)


def test_on_a_cpu_the_process_is_in_the_same_memory() -> None:
    holding = dataclasses.replace(CPU, process_bytes=5 * 10**8)
    planned = estimate(SMALL, Workload(), holding)
    assert planned.process_bytes == 5 * 10**8
    assert planned.trainer_bytes - estimate(SMALL, Workload(), CPU).trainer_bytes == 5 * 10**8
    assert find_device("cpu").process_bytes > 0
    assert all(gpu.process_bytes == 0 for gpu in GPUS.values())


def test_sampling_takes_devices_and_a_cache_of_its_own() -> None:
    without = estimate(LARGE, Workload(), GPUS["l4"])
    sampling = estimate(LARGE, Workload(sampled_tokens=8192), GPUS["l4"])
    assert (without.num_sampler_devices, without.cache_bytes) == (0, 0)
    assert sampling.num_sampler_devices == 1
    assert sampling.cache_bytes == 32 * 512 * LARGE.kv_numbers_per_token * 2
    assert sampling.step_s > without.step_s


@pytest.mark.parametrize(
    ("name", "value"),
    [("rank", -1), ("num_sequences", 0), ("sequence_tokens", 1), ("num_steps", 0)],
)
def test_a_workload_out_of_range_is_refused(name: str, value: int) -> None:
    with pytest.raises(tinsmith.ConfigurationError, match=f"{name} is {value}; give"):
        Workload(**{name: value})


def test_the_command_shows_the_plan_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2.5-0.5b"]))
    words = ("plan", "--model", str(tmp_path), "--device", "h100")
    assert invoke(*words) == 0
    text = capsys.readouterr().out
    assert text.startswith("qwen2, 494 M parameters; trains an adapter of rank 32\n")
    assert "on 1 x h100 with 80.0 GB" in text
    assert invoke(*words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_devices"] == 1
    assert invoke("plan", "--model", str(tmp_path), "--device", "tpu") == 1
    assert "name one of cpu, b200" in capsys.readouterr().err


def test_this_machine_is_measured() -> None:
    here = find_device("cpu")
    assert here.memory_bytes > 2**28
    assert here.flops_per_s > 1e6
