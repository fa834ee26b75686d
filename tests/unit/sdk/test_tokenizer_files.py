"""What the files of a tokenizer say beyond how text becomes tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.fakes.chat_models import chat_tokenizer, tokenizer_files
from tests.fakes.family_templates import CHATML, QWEN25
from transformers import PreTrainedTokenizerFast

from tinsmith.text.tokenizer import Tokenizer
from tinsmith_gateway.tokenizing.model_tokenizer import ModelTokenizer
from tinsmith_runtime.text.tokenizer_files import read_tokenizer

LONG = "word " * 30 + "ANSWER THIS"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "ADDS"}}]
ASKED = [{"role": "user", "content": "q"}]


def left_behind(**settings: bool) -> dict[str, bytes]:
    """Return the files of a tokenizer that a trainer saved after a call of it."""
    files = tokenizer_files(CHATML)
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.enable_truncation(24)
    if settings.get("padding"):
        tokenizer.enable_padding(length=24)
    return {**files, "tokenizer.json": tokenizer.to_str().encode()}


@pytest.mark.parametrize("padding", [False, True])
def test_a_text_is_neither_cut_nor_filled_by_what_a_trainer_left_behind(padding: bool) -> None:
    plain, left = chat_tokenizer(CHATML), Tokenizer(left_behind(padding=padding))
    for text in (LONG, "hi", ""):
        assert left.encode(text) == plain.encode(text)
        messages = [{"role": "user", "content": text}]
        assert left.apply_chat_template(messages) == plain.apply_chat_template(messages)
    there = ModelTokenizer(left_behind(padding=padding))
    assert len(there.encode(LONG, add_special_tokens=True)) == len(plain.encode(LONG))


def write_named(folder: Path, *, in_files: bool) -> None:
    """Write a tokenizer with a template of its own for tools, as transformers keeps it."""
    files = tokenizer_files(CHATML)
    config: dict[str, Any] = json.loads(files["tokenizer_config.json"])
    if in_files:
        del config["chat_template"]
        (folder / "chat_template.jinja").write_text(CHATML)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(QWEN25)
    else:
        named = {"default": CHATML, "tool_use": QWEN25}
        config["chat_template"] = [
            {"name": name, "template": source} for name, source in named.items()
        ]
    (folder / "tokenizer.json").write_bytes(files["tokenizer.json"])
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("in_files", [False, True])
def test_the_template_of_tools_renders_conversations_with_tools(
    tmp_path: Path, in_files: bool
) -> None:
    write_named(tmp_path, in_files=in_files)
    tokenizer = Tokenizer(dict(read_tokenizer(tmp_path).files))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools in (None, TOOLS):
        expected = reference.apply_chat_template(ASKED, tools=tools, return_dict=False)
        assert tokenizer.apply_chat_template(ASKED, tools=tools) == expected
    assert (tokenizer.chat_template, tokenizer.tool_template) == (CHATML, QWEN25)


def test_the_template_of_a_processor_is_read(tmp_path: Path) -> None:
    files = tokenizer_files(CHATML)
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"])
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert Tokenizer(dict(read_tokenizer(tmp_path).files)).chat_template == CHATML
