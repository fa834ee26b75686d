"""What both sides of the benchmark compute: the model, the batches, the optimizer.

Imported by the bench and by the bare child, so that neither can do less work than the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 4096
RANK = 32
LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
EPS = 1e-12
NUM_PROMPTS = 16
PROMPT_TOKENS = 16
SAMPLED_TOKENS = 64

_NUM_BATCHES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCase:
    """One shape of a training step, and how often it is measured."""

    num_sequences: int
    num_tokens: int
    num_steps: int
    """Steps of one repeat."""
    num_repeats: int

    @property
    def name(self) -> str:
        """Sequences x tokens, as in `8x128`."""
        return f"{self.num_sequences}x{self.num_tokens}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one batch."""
        return self.num_sequences * self.num_tokens


def make_batches(num_sequences: int, num_tokens: int) -> list[NDArray[np.int64]]:
    """Return the batches that steps take in turn: int64 [sequences, tokens + 1] each.

    Position `i` predicts position `i + 1`; equal arguments give equal batches.
    """
    random = np.random.default_rng((num_sequences, num_tokens))
    shape = (_NUM_BATCHES, num_sequences, num_tokens + 1)
    return list(random.integers(0, VOCAB_SIZE, shape))


def make_prompts() -> NDArray[np.int64]:
    """Return the prompts to sample from, int64 [prompts, tokens]."""
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, (NUM_PROMPTS, PROMPT_TOKENS))


def build_model(directory: Path) -> None:
    """Write a Qwen3 model with random weights, float32, 3.4 million parameters."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    # Never used here, but a server lists only models that have a tokenizer.
    words = {f"t{index}": index for index in range(VOCAB_SIZE)}
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(directory / "tokenizer.json"))
