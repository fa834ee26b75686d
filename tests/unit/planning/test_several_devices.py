"""What runs on several devices of a pod, and what is refused with what to do instead."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.sdk.test_cli import invoke

from tinsmith.planning.several_devices import SHARDED_FAMILIES, Work, published_family, refusal
from tinsmith_engine.distributed.process_group import Ranks
from tinsmith_engine.distributed.sharded_loading import load_sharded_engine
from tinsmith_runtime.errors import ConfigError

MOE, VISION = "qwen3_moe", "qwen2_5_vl"
MOE_CONFIG = {
    "model_type": MOE,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}


@pytest.mark.parametrize(
    ("work", "family", "said"),
    [
        *((Work.ADAPTERS, family, "") for family in (*SHARDED_FAMILIES, "")),
        (Work.ADAPTERS, MOE, "trained on one device"),
        (Work.ADAPTERS, VISION, "trained on one device"),
        (Work.ADAPTERS, "gemma3", "trained on one device"),
        (Work.FULL, MOE, ""),
        (Work.EMBEDDED, "qwen3", "take engine vllm"),
        (Work.EMBEDDED, MOE, "take engine vllm"),
        (Work.EMBEDDED, "", "take engine vllm"),
        (Work.VLLM, MOE, ""),
        (Work.VLLM, "", ""),
        (Work.VLLM, VISION, "take engine embedded"),
    ],
)
def test_a_refusal_says_what_to_do_instead(work: Work, family: str, said: str) -> None:
    for num_devices in (2, 8):
        found = refusal(work, family, num_devices)
        assert said in found
        assert bool(said) == bool(found)
    assert refusal(work, family, 1) == refusal(work, family, 0) == ""


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("hf://Qwen/Qwen3-30B-A3B", MOE),
        ("hf://Qwen/Qwen3-235B-A22B-Thinking-2507", MOE),
        ("hf://Qwen/Qwen3-Coder-30B-A3B-Instruct", MOE),
        ("hf://Qwen/Qwen2.5-VL-72B-Instruct", VISION),
        ("hf://Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl"),
        ("hf://Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl"),
        ("hf://Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3_vl_moe"),
        ("hf://Qwen/Qwen3-8B", ""),
        ("hf://somebody/Qwen3-30B-A3B", ""),
        ("pvc://models/Qwen3-30B-A3B", ""),
    ],
)
def test_the_publisher_tells_a_family_by_the_name(source: str, family: str) -> None:
    assert published_family(source) == family


def write_config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(MOE_CONFIG | changes))
    return file


def test_a_plan_that_needs_more_devices_than_the_model_can_use_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", "--model", str(write_config(tmp_path)), "--device", "h100")
    assert invoke(*words) == 1
    assert "adapters of a model of the type qwen3_moe are trained on one device" in (
        capsys.readouterr().err
    )
    write_config(tmp_path, num_hidden_layers=2)
    assert invoke(*words) == 0
    assert "1 x h100" in capsys.readouterr().out


def test_a_trainer_refuses_before_it_reads_a_weight(tmp_path: Path) -> None:
    write_config(tmp_path)  # There are no weights in the folder.
    ranks = cast(Ranks, SimpleNamespace(world_size=2, device="cpu"))
    settings = {"dtype": "float32", "max_resident_runs": 1, "exact": None, "compiled": False}
    with pytest.raises(ConfigError, match="shard_base: adapters of a model of the type qwen3_moe"):
        load_sharded_engine(ranks, tmp_path, shard_base=True, **settings)
