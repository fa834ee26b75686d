"""Tokenizers and chat templates against transformers, which is the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.fakes.sdk_fake_server import FakeServer
from transformers import PreTrainedTokenizerFast

import tinsmith
from tinsmith.text.tokenizer import Tokenizer, TokenizerCache

CHATML = (
    "{%- if tools %}\n{{- '<|im_start|>system\\n# Tools' }}\n"
    "{%- for tool in tools %}\n{{- '\\n' + (tool | tojson) }}\n{%- endfor %}\n"
    "{{- '<|im_end|>\\n' }}\n{%- endif %}\n"
    "{% for message in messages %}\n"
    "  {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}\n"
    "{{- '<think>\\n\\n</think>\\n\\n' }}\n{%- endif %}\n{%- endif %}\n"
)
LLAMA = (
    "{{- bos_token }}\n{%- set ns = namespace(seen=false) %}\n"
    "{%- for message in messages %}\n"
    "{%- if message['role'] == 'system' and ns.seen %}{%- continue %}{%- endif %}\n"
    "{%- set ns.seen = true %}\n"
    "[{{ message['role'] | upper }}] {{ message['content'] | trim }}{{ eos_token }}\n"
    "{%- endfor %}\n{% if add_generation_prompt %}[ASSISTANT] {% endif %}"
)
GENERATION = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}<{{ message.content }}>{% endif %}"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{% endfor %}"
)
# Each shows what the messages hold; the first has tools, the last has thoughts.
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are <terse> & 'kind'."},
    {"role": "user", "content": "  naïve 日本 → hello\n"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "bye"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <a> & b",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]


def make_files(template: str | None) -> dict[str, bytes]:
    """Return the files of a byte-level tokenizer that adds a BOS token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello assistant user system hello"] * 5, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
    }
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    files["tokenizer_config.json"] = json.dumps(config).encode()
    return files


def load_reference(files: dict[str, bytes], folder: Path) -> Any:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize(
    ("template", "tools", "thought"),
    [
        pytest.param(CHATML, None, {}, id="chatml"),
        pytest.param(CHATML, TOOLS, {}, id="chatml-with-tools"),
        pytest.param(LLAMA, None, {}, id="llama"),
        pytest.param(GENERATION, None, {"thinking": "short"}, id="generation"),
    ],
)
@pytest.mark.parametrize("generation", [True, False])
def test_templates_render_as_transformers_renders_them(
    tmp_path: Path, template: str, generation: bool, tools: Any, thought: dict[str, str]
) -> None:
    messages = [*MESSAGES[:2], {**MESSAGES[2], **thought}, MESSAGES[3]]
    files = make_files(template)
    reference = load_reference(files, tmp_path / "model")
    arguments: dict[str, Any] = {
        "add_generation_prompt": generation,
        "tools": tools,
        "enable_thinking": False,
    }
    ours = Tokenizer(files)
    expected = reference.apply_chat_template(messages, tokenize=False, **arguments)
    assert ours.render_chat_template(messages, **arguments) == expected
    expected_ids = reference.apply_chat_template(messages, return_dict=False, **arguments)
    assert ours.apply_chat_template(messages, **arguments) == expected_ids


def test_encoding_and_decoding_agree_with_transformers(tmp_path: Path) -> None:
    files = make_files(None)
    reference = load_reference(files, tmp_path / "model")
    ours = Tokenizer(files)
    text = "hello <|im_end|> naïve 日本"
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == reference.encode(text, add_special_tokens=special)
        assert ours.decode(ids) == reference.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == reference.decode(
            ids, skip_special_tokens=True
        )
    assert ours.eos_token_id == reference.eos_token_id
    assert ours.bos_token_id == reference.bos_token_id
    assert ours.vocab_size == len(reference)


def test_a_template_inside_the_configuration_is_used() -> None:
    files = make_files(None)
    config = json.loads(files["tokenizer_config.json"])
    config["chat_template"] = [
        {"name": "other", "template": "x"},
        {"name": "default", "template": "{{ messages[0].content }}!"},
    ]
    files["tokenizer_config.json"] = json.dumps(config).encode()
    assert Tokenizer(files).render_chat_template([{"role": "user", "content": "hey"}]) == "hey!"


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ raise_exception('roles must alternate') }}", id="refusal"),
        pytest.param("{{ messages.append(1) }}", id="mutation"),
        pytest.param("{{ ''.__class__.__mro__[1].__subclasses__() }}", id="escape"),
    ],
)
def test_a_template_that_refuses_or_escapes_is_a_typed_error(template: str) -> None:
    with pytest.raises(tinsmith.InvalidArgumentError, match="chat template"):
        Tokenizer(make_files(template)).render_chat_template(MESSAGES)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(tinsmith.FailedPreconditionError, match=r"encode\(\)"):
        Tokenizer(make_files(None)).apply_chat_template(MESSAGES)


def test_files_travel_once(server: FakeServer, client: tinsmith.Client) -> None:
    server.state.tokenizer_files = make_files(CHATML)
    first = client.get_tokenizer("tiny")
    assert server.state.last["GetTokenizer"].known_digest == ""
    again = client.create_lora_training_run("tiny").get_tokenizer()
    assert server.state.last["GetTokenizer"].known_digest == server.state.tokenizer_digest
    assert first.encode("hello") == again.encode("hello")


def test_a_hostile_file_name_is_not_written(tmp_path: Path) -> None:
    cache = TokenizerCache(tmp_path / "cache")
    cache.store("m", "ab" * 32, {"../../evil": b"x", "tokenizer.json": b"{}"})
    cache.store("m", "../up", {"tokenizer.json": b"{}"})
    assert list(tmp_path.rglob("*")) == []
    assert cache.known_digest("m") == ""
