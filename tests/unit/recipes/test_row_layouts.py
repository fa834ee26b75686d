"""Rows in the layouts that people have: every text is read and the right ones are trained on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.chat_models import chat_tokenizer
from tests.fakes.family_templates import FAMILIES, QWEN25

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.tasks.conversations import ALL, LAST, Conversation, read_conversations
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import Datum

FUNCTION = {
    "name": "weather",
    "description": "TELLS",
    "parameters": {"type": "object", "properties": {}},
}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"name": "weather", "arguments": {"city": "ROME"}}
WEIGHED = [
    {"role": "user", "content": "ASKED"},
    {"role": "assistant", "content": "BAD", "weight": 0},
    {"role": "user", "content": "AGAIN"},
    {"role": "assistant", "content": "GOOD", "weight": 1},
]


def turns(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


def shared(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in pairs]


CALLED = shared(
    ("human", "ASKED"), ("function_call", json.dumps(CALL)), ("observation", "SUNNY"), ("gpt", "OK")
)
# Each with the texts that are trained on.
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "messages": ({"messages": turns("ASKED", "SAID")}, ["SAID"]),
    "parts": (
        {"messages": [*turns("ASKED"), {"role": "assistant", "content": [{"text": "SAID"}]}]},
        ["SAID"],
    ),
    "weights": ({"messages": WEIGHED}, ["GOOD"]),
    "all-weighed": (
        {"messages": [{**WEIGHED[0], "weight": None}, {**WEIGHED[1], "weight": 1}, *WEIGHED[2:]]},
        ["BAD", "GOOD"],
    ),
    "train-of-axolotl": (
        {
            "messages": [
                {**turn, "train": turn["content"] == "SAID"}
                for turn in turns("ASKED", "BAD", "MORE", "SAID")
            ]
        },
        ["SAID"],
    ),
    "columns-of-two-layouts": (
        {"prompt": None, "completion": None, "messages": turns("ASKED", "SAID")},
        ["SAID"],
    ),
    "prompt-of-messages": (
        {"prompt": "ASKED", "prompt_id": "x", "messages": turns("ASKED", "SAID")},
        ["SAID"],
    ),
    "conversational": (
        {"prompt": turns("ASKED"), "completion": [{"role": "assistant", "content": "SAID"}]},
        ["SAID"],
    ),
    "conversational-rounds": (
        {
            "prompt": turns("FIRST", "BEFORE", "ASKED"),
            "completion": {"role": "assistant", "content": "SAID"},
        },
        ["SAID"],
    ),
    "question": ({"question": "ASKED", "answer": "SAID"}, ["SAID"]),
    "alpaca": (
        {"instruction": "ASKED", "input": "BESIDE", "output": "SAID", "system": "RULE"},
        ["SAID"],
    ),
    "alpaca-history": (
        {"instruction": "ASKED", "input": "", "output": "SAID", "history": [["OLD", "ANSWER"]]},
        ["SAID"],
    ),
    "dolly": ({"instruction": "ASKED", "context": "BESIDE", "response": "SAID"}, ["SAID"]),
    "system-beside": (
        {"system": "RULE", "conversations": shared(("human", "ASKED"), ("gpt", "SAID"))},
        ["SAID"],
    ),
    "dialects": (
        {"conversations": shared(("system", "RULE"), ("User", "ASKED"), ("chatgpt", "SAID"))},
        ["SAID"],
    ),
    "calls-of-sharegpt": ({"conversations": CALLED, "tools": json.dumps([FUNCTION])}, ["OK"]),
    "tools-as-text": (
        {
            "tools": json.dumps([TOOL]),
            "messages": [
                *turns("ASKED"),
                {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]},
            ],
        },
        ["ROME"],
    ),
    "functions-of-old": (
        {
            "functions": [FUNCTION],
            "messages": [
                *turns("ASKED"),
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "weather", "arguments": '{"city": "ROME"}'},
                },
                {"role": "function", "name": "weather", "content": "SUNNY"},
                {"role": "assistant", "content": "OK"},
            ],
        },
        ["OK"],
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no-weight": ({"messages": WEIGHED[:2]}, "nothing of the line is trained on"),
    "weight-of-a-user": (
        {"messages": [{**WEIGHED[0], "weight": 1}, WEIGHED[3]]},
        "of the user is marked to be trained on",
    ),
    "weight-of-two": ({"messages": [WEIGHED[0], {**WEIGHED[3], "weight": 2}]}, "the weight 2"),
    "ranges": (
        {"messages": [WEIGHED[0], {**WEIGHED[3], "train_detail": [{"begin_offset": 0}]}]},
        "train_detail",
    ),
    "segments": ({"segments": [{"text": "x", "label": True}]}, "keys segments is no conversation"),
    "pictures": ({"messages": turns("q", "a"), "images": ["a.png"]}, r"shows images.*\(images\)"),
    "two-systems": (
        {"system": "A", "messages": [{"role": "system", "content": "B"}, *turns("q", "a")]},
        "two prompts of the system",
    ),
    "broken-call": (
        {"conversations": [*CALLED[:1], {"from": "function_call", "value": "{"}, *CALLED[2:]]},
        "a call cannot be read as JSON",
    ),
    "broken-tools": ({"messages": turns("q", "a"), "tools": "[{"}, "the tools cannot be read"),
    "nameless-tool": ({"messages": turns("q", "a"), "tools": [{}]}, "a tool has no name"),
    "half-a-pair": ({"messages": turns("\ud83d", "a")}, "half of a surrogate pair"),
    "picture-part": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, *turns("q", "a")[1:]]},
        "no content that is text alone",
    ),
    "history": (
        {"instruction": "q", "output": "a", "history": ["x"]},
        "history is no list of pairs",
    ),
    "empty": ({"messages": []}, "a line with the keys messages is no conversation"),
}


def read(tmp_path: Path, row: object) -> Conversation:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [conversation] = read_conversations(path)
    return conversation


def texts(datum: Datum, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the text of a datum, and the one that is trained on."""
    targets = [int(token) for token in datum.loss_fn_inputs["target_tokens"]]
    weights = datum.loss_fn_inputs["weights"]
    whole = tokenizer.decode([datum.model_input.to_ints()[0], *targets])
    trained = [token for token, weight in zip(targets, weights, strict=True) if weight]
    return whole, tokenizer.decode(trained)


def words(value: object) -> list[str]:
    text = value if isinstance(value, str) else json.dumps(value)
    return re.findall(r"\b[A-Z]{2,}\b", text)


@pytest.mark.parametrize("name", ROWS)
def test_every_text_of_a_row_is_read_and_the_answers_are_trained_on(
    tmp_path: Path, name: str
) -> None:
    row, answers = ROWS[name]
    tokenizer = chat_tokenizer(QWEN25)
    [datum] = read(tmp_path, row).to_data(tokenizer)
    whole, trained = texts(datum, tokenizer)
    assert set(words(row)) <= set(words(whole))
    assert words(trained) == answers


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_cannot_be_read_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    row, message = REFUSED[name]
    with pytest.raises(ConfigurationError, match=f"^rows.jsonl:1: .*{message}") as refusal:
        read(tmp_path, row)
    assert refusal.value.remedy


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_trained_on_whole_or_refused_by_every_family(
    tmp_path: Path, family: str, name: str
) -> None:
    row, answers = ROWS[name]
    tokenizer = chat_tokenizer(FAMILIES[family])
    refusal = None
    try:
        data = read(tmp_path, row).to_data(tokenizer)
    except ConfigurationError as error:
        refusal = error
    if refusal is not None:
        assert refusal.message.startswith("rows.jsonl:1: ")
        return
    found = [texts(datum, tokenizer) for datum in data]
    assert set(words(row)) <= {word for whole, _ in found for word in words(whole)}
    said = [word for _, trained in found for word in words(trained)]
    assert [word for word in said if word in words(row)] == answers


# Without the marks of the template itself, and without white space at the ends: templates trim.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), min_size=1).map(
    lambda text: f"a{text}z"
)


@given(texts_of=st.lists(TEXTS, min_size=2, max_size=6).filter(lambda each: len(each) % 2 == 0))
@pytest.mark.parametrize("family", ["chatml", "qwen3-first", "llama2", "gemma3", "smolvlm"])
@pytest.mark.parametrize("train_on", [LAST, ALL])
def test_every_text_of_a_row_that_is_accepted_is_in_what_is_trained_on(
    family: str, train_on: str, texts_of: list[str]
) -> None:
    tokenizer = chat_tokenizer(FAMILIES[family])
    [datum] = Conversation(turns(*texts_of), None, "x:1").to_data(tokenizer, train_on)
    whole, trained = texts(datum, tokenizer)
    assert all(text in whole for text in texts_of)
    answers = texts_of[1::2] if train_on == ALL else texts_of[-1:]
    assert [piece.strip(" ") for piece in trained.split("<|im_end|>")] == [*answers, ""]
