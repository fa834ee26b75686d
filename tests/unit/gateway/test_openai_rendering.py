"""Conversations to prompts, compared with transformers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.scripted_sampler import IMAGE_TOKEN, tokenizer_files
from transformers import PreTrainedTokenizerFast

from tinsmith.tensors import decode_tensor
from tinsmith_gateway.openai.rendering import Conversation, prompt_of_tokens, render
from tinsmith_gateway.tokenizing.model_tokenizer import ModelTokenizer
from tinsmith_runtime.errors import EmptyBatchError, InvalidFieldError

QWEN = ModelTokenizer(tokenizer_files())
# Reads strings alone, and quotes arguments.
PLAIN_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] | trim }}"
    "{% for call in message.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    "{% endfor %}\n{% endfor %}{% if tools %}{% endif %}"
)
PLAIN = ModelTokenizer(tokenizer_files(PLAIN_TEMPLATE))
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":  1}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 1 = ?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "user", "content": "  naïve 日本\n"},
]
PNG = base64.b64encode(b"\x89PNG").decode()


def image(url: str = f"data:image/png;base64,{PNG}") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def rendered(
    tokenizer: ModelTokenizer, messages: list[dict[str, Any]], **options: Any
) -> list[int]:
    conversation = Conversation(messages=messages, **{"variables": {}, **options})
    return list(render(conversation, tokenizer).tokens)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("reference")
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no-tools", "tools"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"add_generation_prompt": True}, id="generation"),
        pytest.param({"add_generation_prompt": False}, id="as-it-is"),
        pytest.param(
            {"add_generation_prompt": False, "continue_final_message": True}, id="continued"
        ),
    ],
)
def test_prompts_are_those_of_transformers(reference: Any, options: Any, tools: Any) -> None:
    expected = reference.apply_chat_template(MESSAGES, tools=tools, return_dict=False, **options)
    assert rendered(QWEN, MESSAGES, tools=tools, **options) == expected


def test_the_messages_are_not_changed() -> None:
    before = json.dumps(MESSAGES)
    for tokenizer in (QWEN, PLAIN):
        rendered(tokenizer, MESSAGES[:1], continue_final_message=True, add_generation_prompt=False)
        rendered(tokenizer, [{**message, "content": "x"} for message in MESSAGES])
    assert json.dumps(MESSAGES) == before


def test_text_parts_are_joined_for_a_template_that_reads_strings() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert rendered(PLAIN, [{"role": "user", "content": parts}]) == rendered(
        PLAIN, [{"role": "user", "content": "a b"}]
    )


def test_arguments_are_an_object_where_the_template_would_quote_a_string() -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert '"parameters": {"a": 1}' in PLAIN.decode(rendered(PLAIN, messages))
    assert '"arguments": {"a":  1}' in QWEN.decode(rendered(QWEN, messages))


def test_images_stand_where_the_template_has_their_placeholders() -> None:
    content = [{"type": "text", "text": "<"}, image(), image(), {"type": "text", "text": ">"}]
    conversation = Conversation(messages=[{"role": "user", "content": content}], variables={})
    prompt = render(conversation, QWEN)
    kinds = [chunk.WhichOneof("content") for chunk in prompt.model_input.chunks]
    assert kinds == ["tokens", "image", "image", "tokens"]
    first, one, _, last = prompt.model_input.chunks
    assert QWEN.decode(decode_tensor(first.tokens).tolist()).endswith("user\n<")
    assert QWEN.decode(decode_tensor(last.tokens).tolist()).startswith("><|im_end|>")
    assert (one.image.format, one.image.data) == ("png", b"\x89PNG")
    placeholder = QWEN.token_to_id(IMAGE_TOKEN)
    assert prompt.tokens.count(placeholder) == 2


@pytest.mark.parametrize(
    ("tokenizer", "content", "problem"),
    [
        pytest.param(PLAIN, [image()], "reads no images", id="no-images"),
        pytest.param(QWEN, [image("https://example.com/a.png")], "no data: URL", id="far-away"),
        pytest.param(QWEN, [image("data:image/gif;base64,AAAA")], "no data: URL", id="gif"),
        pytest.param(QWEN, [image("data:image/png;base64,%%%")], "not base64", id="no-base64"),
        pytest.param(
            QWEN, [{"type": "text", "text": IMAGE_TOKEN}, image()], "2 places", id="in-the-text"
        ),
        pytest.param(QWEN, [{"type": "input_audio"}], "neither text nor image", id="audio"),
    ],
)
def test_images_are_refused(
    tokenizer: ModelTokenizer, content: list[dict[str, Any]], problem: str
) -> None:
    with pytest.raises(InvalidFieldError, match=problem):
        rendered(tokenizer, [{"role": "user", "content": content}])


def test_a_template_that_fails_refuses_the_conversation() -> None:
    broken = ModelTokenizer(tokenizer_files("{{ messages[0].content + 1 }}"))
    with pytest.raises(
        InvalidFieldError, match="template failed on the conversation with TypeError"
    ):
        rendered(broken, [{"role": "user", "content": "x"}])
    refusing = ModelTokenizer(tokenizer_files("{{ raise_exception('no system') }}"))
    with pytest.raises(InvalidFieldError, match="no system"):
        rendered(refusing, [{"role": "system", "content": ""}])


def test_variables_reach_the_template_but_do_not_replace_what_it_is_given() -> None:
    tokenizer = ModelTokenizer(tokenizer_files("{{ messages[0].content }}{{ mood }}"))
    messages = [{"role": "user", "content": "hi "}]
    tokens = rendered(tokenizer, messages, variables={"mood": "calm"})
    assert tokenizer.decode(tokens) == "hi calm"
    with pytest.raises(InvalidFieldError, match="chat_template_kwargs"):
        rendered(tokenizer, messages, variables={"messages": []})


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(EmptyBatchError):
        prompt_of_tokens([])


@given(st.text(min_size=1))
def test_the_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    parts = [QWEN.bytes_of(token) for token in QWEN.encode(text)]
    assert b"".join(part or b"" for part in parts).decode() == text
