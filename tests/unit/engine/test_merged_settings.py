"""A merged export ends its turns where the chat template does, whatever serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.family_templates import CHATML
from tests.unit.engine.conftest import save_tiny
from tests.unit.engine.test_merging import merged, run_of
from tests.unit.runtime.test_ends_of_turns import write_model
from transformers import AutoTokenizer

from tinsmith_engine import LoraConfig


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, {"eos_token_id": [256, 258]}),
        ({"eos_token_id": 256, "top_k": 20}, {"eos_token_id": [256, 258], "top_k": 20}),
    ],
)
def test_the_end_of_turn_is_in_the_generation_settings(
    given: dict[str, Any] | None, wanted: dict[str, Any], tmp_path: Path
) -> None:
    base = save_tiny(tmp_path / "base", "qwen3")
    (base / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((base / "config.json").read_text())
    write_model(base, CHATML, **{**config, "eos_token_id": 256})
    if given is not None:
        (base / "generation_config.json").write_text(json.dumps(given))
    engine = run_of(base, LoraConfig(rank=2, seed=1))
    out = tmp_path / "out"
    out.mkdir()
    files = merged(base, engine, LoraConfig(rank=2, seed=1), out)
    assert json.loads((out / "generation_config.json").read_text()) == wanted
    assert {"generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(files)


TOOL_USE = "{{ tools[0].function.name }}: {{ messages[0].content }}"


@pytest.mark.parametrize("own", ["", "{{ messages[0].content }}!"], ids=["base", "of-the-run"])
def test_templates_of_all_names_are_exported(own: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "qwen3")
    config = json.loads((base / "config.json").read_text())
    write_model(base, CHATML, **{**config, "eos_token_id": 256})
    (base / "chat_template.jinja").write_text(CHATML)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    adapter = LoraConfig(rank=2, seed=1, chat_template=own, stop_token_ids=(7,) if own else ())
    out = tmp_path / "out"
    out.mkdir()
    merged(base, run_of(base, adapter), adapter, out)
    loaded: Any = AutoTokenizer.from_pretrained(out)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    asked = [{"role": "user", "content": "hi"}]
    with_tools = loaded.apply_chat_template(asked, tools=tools, tokenize=False)
    assert with_tools == ("hi!" if own else "add: hi")
    plain = loaded.apply_chat_template(asked, tokenize=False)
    original: Any = AutoTokenizer.from_pretrained(base)
    assert plain == ("hi!" if own else original.apply_chat_template(asked, tokenize=False))
    ends = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert (7 in ends) is bool(own)
