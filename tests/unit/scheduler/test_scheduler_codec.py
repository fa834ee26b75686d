from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tinsmith.v1 import models_pb2
from tinsmith_runtime.adapters import (
    AdapterConfig,
    FullConfig,
    LoraConfig,
    adapter_from_json,
    adapter_to_json,
)
from tinsmith_runtime.errors import ConfigError, InvalidFieldError
from tinsmith_runtime.rpc.adapter_codec import encode_adapter
from tinsmith_runtime.rpc.requests import decode_page_token, encode_page_token
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.rpc import codec


def lora(**fields: Any) -> models_pb2.AdapterConfig:
    return models_pb2.AdapterConfig(lora=models_pb2.LoraConfig(**fields))


@pytest.mark.parametrize(
    "message", [models_pb2.AdapterConfig(), lora()], ids=["no-adapter", "empty-lora"]
)
def test_adapter_defaults_are_filled_in(message: models_pb2.AdapterConfig) -> None:
    assert encode_adapter(codec.decode_adapter(message)) == lora(
        rank=32,
        alpha=32,
        seed=0,
        train_attention=True,
        train_mlp=True,
        train_unembedding=False,
    )


@pytest.mark.parametrize("adapter", [LoraConfig(seed=2**64 - 1, alpha=0.5), FullConfig()])
def test_adapter_survives_storage_and_wire(adapter: AdapterConfig) -> None:
    assert adapter_from_json(adapter_to_json(adapter)) == adapter
    assert codec.decode_adapter(encode_adapter(adapter)) == adapter


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 0},
        {"rank": -1},
        {"rank": 129},
        {"alpha": 0},
        {"alpha": -1},
        {"alpha": math.nan},
        {"alpha": math.inf},
        {"train_attention": False, "train_mlp": False},
    ],
    ids=str,
)
def test_adapter_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError):
        codec.decode_adapter(lora(**fields))


def test_page_token_belongs_to_its_list() -> None:
    token = encode_page_token("a", 7)
    assert decode_page_token("a", token) == 7
    assert decode_page_token("a", "") is None
    forged = encode_page_token("a", 10**30)
    for wrong in (encode_page_token("b", 7), token[:-1], token + "A", "x", "\u00e9", forged):
        with pytest.raises(InvalidFieldError):
            decode_page_token("a", wrong)


@pytest.mark.parametrize(
    "settings",
    [
        {"session_timeout_s": 0},
        {"session_timeout_s": 5, "heartbeat_interval_s": 5},
        {"worker_timeout_s": 1},
        {"max_runs_per_project": 0},
        {"bootstrap_key": "secret-words"},
        {"bootstrap_project": "a/b"},
        {"listen_address": "nowhere"},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        SchedulerConfig(data_dir=tmp_path, **settings)
    assert "secret-words" not in str(error.value)
