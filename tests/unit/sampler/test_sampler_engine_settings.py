"""Settings of the engine of a sampler."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith_runtime.errors import ConfigError
from tinsmith_sampler.config import SamplerConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"engine": "sglang"}, "embedded, vllm", id="engine"),
        pytest.param({"vllm_max_adapter_rank": 24}, "8, 16, 32", id="rank"),
        pytest.param({"vllm_tensor_parallel_size": -1}, "at least 0", id="parallel"),
        pytest.param({"vllm_stall_timeout_s": 0}, "vllm_stall_timeout_s", id="stall"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SamplerConfig(storage_uri="file:///store", **settings)
