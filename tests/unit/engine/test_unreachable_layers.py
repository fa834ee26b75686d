"""An adapter that would leave out layers which it names is refused by their name."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from tinsmith_engine.base.types import FullConfig, LoraConfig
from tinsmith_engine.training.engine import Engine
from tinsmith_runtime.errors import InvalidFieldError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return Engine.load(folder, max_resident_runs=2)


@pytest.mark.parametrize(
    ("asked", "layer"),
    [
        ({"train_mlp": False}, r"train_attention must be false.*h\.0\.attn\.c_attn"),
        ({"train_attention": False}, r"train_mlp must be false.*h\.0\.mlp\.c_fc"),
    ],
)
def test_layers_that_are_no_linear_layers_are_named(
    engine: Engine, asked: dict[str, bool], layer: str
) -> None:
    config = LoraConfig(rank=4, seed=0, train_unembedding=True, **asked)
    with pytest.raises(InvalidFieldError, match=layer):
        engine.check_new_run(config)


def test_what_is_reached_may_be_trained(engine: Engine) -> None:
    head = LoraConfig(
        rank=4, seed=0, train_attention=False, train_mlp=False, train_unembedding=True
    )
    engine.check_new_run(head)
    engine.check_new_run(FullConfig())
