"""Every text of a conversation is in the prompt of every family, or is refused by its number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.chat_models import chat_tokenizer, tokenizer_files
from tests.fakes.family_templates import FAMILIES
from transformers import PreTrainedTokenizerFast

from tinsmith.errors import InvalidArgumentError

Messages = list[dict[str, Any]]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "TELLS",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "WHERE"}},
        },
    },
}


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any = '{"city": "ROME"}') -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": "abcdefgh1", "type": "function", "function": function}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


ASKED = say("user", "ASKED")
RESULT = say("tool", "SUNNY", tool_call_id="abcdefgh1")
CALLED = {"role": "assistant", "content": None, "tool_calls": [call()]}
FORMS: dict[str, tuple[Messages, list[dict[str, Any]] | None]] = {
    "text": ([ASKED], None),
    "parts": ([say("user", parts("ASKED"))], None),
    "two-parts": ([say("user", parts("ASKED", "AGAIN"))], None),
    "system": ([say("system", "RULE"), ASKED], None),
    "system-parts": ([say("system", parts("RULE", "LAW")), ASKED], None),
    "system-later": ([ASKED, say("assistant", "SAID"), say("system", "RULE"), ASKED], None),
    "developer": ([say("developer", "RULE"), ASKED], None),
    "unknown-role": ([ASKED, say("critic", "OPINION")], None),
    "answer": ([ASKED, say("assistant", "SAID"), say("user", "MORE")], None),
    "answer-parts": ([ASKED, say("assistant", parts("SAID")), say("user", "MORE")], None),
    "refusal": ([ASKED, say("assistant", None, refusal="NEVER"), say("user", "MORE")], None),
    "call-null": ([ASKED, CALLED, RESULT], [TOOL]),
    "call-empty": ([ASKED, {**CALLED, "content": ""}, RESULT], [TOOL]),
    "call-absent": ([ASKED, {"role": "assistant", "tool_calls": [call()]}, RESULT], [TOOL]),
    "call-object": ([ASKED, {**CALLED, "tool_calls": [call({"city": "ROME"})]}, RESULT], [TOOL]),
    "call-beside-text": ([ASKED, {**CALLED, "content": "WAIT"}, RESULT], [TOOL]),
    "call-without-tools": ([ASKED, CALLED, RESULT], None),
    "call-of-old": (
        [
            ASKED,
            say("assistant", None, function_call={"name": "weather", "arguments": '{"a": "ROME"}'}),
            say("function", "SUNNY", name="weather"),
        ],
        None,
    ),
    "two-calls": (
        [ASKED, {**CALLED, "tool_calls": [call(), call('{"city": "OSLO"}')]}, RESULT, RESULT],
        [TOOL],
    ),
    "result-parts": ([ASKED, CALLED, {**RESULT, "content": parts("SUNNY")}], [TOOL]),
    "tools": ([ASKED], [TOOL]),
    "thought": ([ASKED, say("assistant", "SAID", reasoning_content="THOUGHT")], None),
    "thought-inside": ([ASKED, say("assistant", "<think>\nTHOUGHT\n</think>\n\nSAID")], None),
    "end-of-a-thought-asked": ([say("user", "BEFORE </think> BEHIND")], None),
    "json-and-space": ([say("user", '\n {"a": "ÄÖ\\n <b>"}  \n')], None),
    "same-text-twice": ([ASKED, say("critic", "ASKED"), ASKED], None),
}
RENDERED_EVERYWHERE = {"text", "parts", "two-parts", "answer", "answer-parts", "refusal"}
WITH_CALLS = {"qwen2.5", "qwen3-first", "qwen3", "llama3", "mistral", "gpt-oss", "nemotron"}
CALL_FORMS = {"call-null", "call-empty", "call-absent", "call-object", "result-parts"}
WITHOUT_SYSTEM = {"gemma2"}


def words(messages: Messages, tools: Any) -> list[str]:
    """Return the words in capitals of a conversation, each as often as it was written."""
    return re.findall(r"\b[A-ZÄÖ]{2,}\b", repr([messages, tools or []]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_is_rendered_whole_or_refused_by_its_number(family: str, form: str) -> None:
    messages, tools = FORMS[form]
    tokenizer = chat_tokenizer(FAMILIES[family])
    refusal = None
    try:
        text = tokenizer.render_chat_template(messages, tools=tools)
    except InvalidArgumentError as error:
        refusal = error
    if refusal is not None:
        assert re.match(r"messages\.\d+|tools\.\d+|the chat template refused", refusal.message)
        assert form not in RENDERED_EVERYWHERE
        assert form not in ("system", "developer") or family in WITHOUT_SYSTEM
        assert form not in CALL_FORMS or family not in WITH_CALLS
        return
    written = words(messages, tools)
    for word in set(written):
        assert text.count(word) >= written.count(word), f"{word} of {form} is lost: {text}"
    for spelling in ("None", "'type'", "'city'", '"type": "text"', '\\"city'):
        assert spelling not in text


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_that_say_the_same_are_the_same_prompt(family: str) -> None:
    tokenizer = chat_tokenizer(FAMILIES[family])

    def prompt(form: str) -> str:
        messages, tools = FORMS[form]
        return tokenizer.render_chat_template(messages, tools=tools, add_generation_prompt=True)

    assert prompt("text") == prompt("parts")
    assert prompt("answer") == prompt("answer-parts")
    if family not in WITHOUT_SYSTEM:
        assert prompt("system") == prompt("developer")
    if family in WITH_CALLS:
        assert prompt("call-null") == prompt("call-empty") == prompt("call-absent")


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_transformers_for_the_form_that_the_template_takes(
    family: str, tmp_path: Path
) -> None:
    for name, content in tokenizer_files(FAMILIES[family]).items():
        (tmp_path / name).write_bytes(content)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = chat_tokenizer(FAMILIES[family])
    for form in ("text", "parts", "answer-parts"):
        messages, _ = FORMS[form]
        taken = [
            {**message, "content": "".join(part["text"] for part in message["content"])}
            if isinstance(message["content"], list)
            else message
            for message in messages
        ]
        if family == "smolvlm":
            taken = [{**message, "content": parts(message["content"])} for message in taken]
        expected = reference.apply_chat_template(
            taken, add_generation_prompt=True, return_dict=False
        )
        assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == expected


def test_a_thought_of_a_former_turn_may_be_hidden_and_one_that_is_never_shown_may_not() -> None:
    turns = [ASKED, say("assistant", "SAID", reasoning_content="THOUGHT"), say("user", "MORE")]
    hides = chat_tokenizer(FAMILIES["qwen3-first"]).render_chat_template(turns)
    assert "THOUGHT" not in hides
    assert "SAID" in hides
    with pytest.raises(InvalidArgumentError, match=r"messages\.1\.reasoning_content leaves no"):
        chat_tokenizer(FAMILIES["chatml"]).render_chat_template(turns)
