"""The stored form of what a run trains, and its message."""

from __future__ import annotations

import json

import pytest

from tinsmith_runtime.adapters import (
    AdapterConfig,
    FullConfig,
    LoraConfig,
    adapter_from_json,
    adapter_to_json,
)
from tinsmith_runtime.rpc.adapter_codec import decode_adapter, encode_adapter

ADAPTERS = [
    pytest.param(LoraConfig(rank=4, seed=2), id="lora"),
    pytest.param(FullConfig(), id="full"),
    pytest.param(LoraConfig(chat_template="{{ x }}", stop_token_ids=(3, 4)), id="lora-template"),
    pytest.param(FullConfig(chat_template="{{ x }}", stop_token_ids=(3,)), id="full-template"),
]


@pytest.mark.parametrize("config", ADAPTERS)
def test_both_forms_hold_all_of_it(config: AdapterConfig) -> None:
    assert adapter_from_json(adapter_to_json(config)) == config
    assert decode_adapter(encode_adapter(config)) == config
    assert hash(adapter_from_json(adapter_to_json(config))) == hash(config)


@pytest.mark.parametrize("config", [LoraConfig(rank=4), FullConfig()], ids=["lora", "full"])
def test_without_a_template_the_stored_form_is_that_of_earlier_releases(
    config: AdapterConfig,
) -> None:
    assert not {"chat_template", "stop_token_ids"} & set(json.loads(adapter_to_json(config)))
