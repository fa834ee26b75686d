"""A tiny Qwen2.5-VL model, made on the spot: it reads pictures and calls tools, and knows nothing.

Architecture, file layout and special tokens are those of a real checkpoint; sizes differ. The tower
is frozen in training, as for any vision-language model here, so a tower with random weights stays
what it is: a fixed random projection of patches, from which the decoder learns to read.

The tokenizer has the markers of images and of tool calls as single tokens. Further merges cover
the words of a call, which a real tokenizer has as well: a call then costs some twenty tokens.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tinsmith_local.tiny_model import (
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TURN_END,
    TokenizerSettings,
    build_once,
    recipe_digest,
    write_tokenizer,
)

FORMAT_VERSION = 2
"""Raise it when the same settings give other files."""

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
VISION_TOKENS = (
    *SPECIAL_TOKENS,
    VISION_START,
    VISION_END,
    IMAGE_PAD,
    VIDEO_PAD,
    TOOL_CALL,
    TOOL_CALL_END,
)

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:' }}"
    "{% for tool in tools %}{% set told = tool['function']['description'] %}"
    "{{ ' ' + tool['function']['name'] + (': ' + told if told else '') }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] "
    "+ '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}"
    "{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{% set arguments = call['function']['arguments'] %}"
    "{{ arguments if arguments is string else arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML with images and tools, as Qwen2.5-VL writes it; tools are told by name and description."""

_WORDS = (
    '{"name": "calculator", "arguments": {"expression": "1"}}',
    "<tool_response>\n</tool_response>",
    "Tools: calculator",
    "area",
    "perimeter",
    "diameter",
)
"""Words of prompts and calls that become few tokens."""

_NUM_MERGES = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyVisionConfig:
    """Shape and seed of a tiny vision-language model."""

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    intermediate_size: int = 192
    max_position_embeddings: int = 512
    vision_hidden_size: int = 64
    vision_depth: int = 1
    vision_num_heads: int = 2
    vision_intermediate_size: int = 128
    initializer_range: float = 0.125
    vision_initializer_range: float = 0.125
    seed: int = 0


def build_tiny_vision_model(directory: Path | str) -> Path:
    """Write a tiny Qwen2.5-VL model in Hugging Face layout, unless it is there and complete.

    Args:
        directory: Where the files go; made if missing.

    Returns:
        The directory, absolute.
    """
    config = TinyVisionConfig()
    directory = Path(directory).absolute()
    digest = recipe_digest(
        {
            "format_version": FORMAT_VERSION,
            "config": asdict(config),
            "tokens": [*VISION_TOKENS, *_WORDS, _NUM_MERGES],
            "chat_template": CHAT_TEMPLATE,
        }
    )
    build_once(directory, digest, lambda scratch: _write_files(scratch, config))
    return directory


def _write_files(directory: Path, config: TinyVisionConfig) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    vocab_size = write_tokenizer(
        directory,
        max_tokens=config.max_position_embeddings,
        settings=TokenizerSettings(VISION_TOKENS, CHAT_TEMPLATE, _WORDS, _NUM_MERGES),
    )
    ids = {token: index for index, token in enumerate(VISION_TOKENS)}
    head_dim = config.hidden_size // config.num_heads
    ends = {"bos_token_id": None, "eos_token_id": ids[TURN_END], "pad_token_id": ids[END_OF_TEXT]}
    text = {
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            # As in the published model: a quarter of the frequencies for time, the rest for places.
            "mrope_section": [head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16],
        },
    }
    vision = {
        "depth": config.vision_depth,
        "hidden_size": config.vision_hidden_size,
        "intermediate_size": config.vision_intermediate_size,
        "num_heads": config.vision_num_heads,
        "out_hidden_size": config.hidden_size,
        "window_size": 56,
        "fullatt_block_indexes": [],
        "initializer_range": config.vision_initializer_range,
    }
    torch.manual_seed(config.seed)
    hf_config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text | ends,
        vision_config=vision,
        image_token_id=ids[IMAGE_PAD],
        video_token_id=ids[VIDEO_PAD],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=True,
        **ends,
    )
    model: Any = AutoModelForImageTextToText.from_config(hf_config)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    documents = {
        # Pictures keep their size: 28 pixels along a side are one token.
        "preprocessor_config.json": {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 64},
        "generation_config.json": {
            "do_sample": True,
            "temperature": 1.0,
            "eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]],
            "pad_token_id": ids[END_OF_TEXT],
        },
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
