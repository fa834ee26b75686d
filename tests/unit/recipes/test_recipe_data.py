"""Files of users: what is read, and the one line that says what is wrong and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sdk.test_tokenizer import CHATML, make_files

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.tasks.arithmetic import read_jsonl
from tinsmith.recipes.tasks.conversations import read_conversations
from tinsmith.recipes.tasks.episode_tasks import load_tasks
from tinsmith.text.tokenizer import Tokenizer

UNUSUAL = "a\u2028b\u2029c\u0085d\x1cf"
"""Characters that end a line for `str.splitlines`, and none for JSON."""

CALLS = (
    "{% for m in messages %}<s>{{ m.role }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}call {{ c.function.name }}"
    "({{ c.function.arguments.x }}){% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant{% endif %}"
)
CALL = {"type": "function", "function": {"name": "search", "arguments": '{"x": "tin"}'}}
ASKED = {"role": "user", "content": "hello"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
FOUND = {"role": "tool", "content": "ore"}
SAID = {"role": "assistant", "content": "world"}


def write(path: Path, *records: object) -> Path:
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize(
    ("read", "text"),
    [
        pytest.param(read_conversations, lambda found: found.messages[0]["content"], id="chats"),
        pytest.param(read_jsonl, lambda found: found.question, id="problems"),
        pytest.param(
            lambda path: load_tasks(str(path)).train,
            lambda found: found.content["question"],
            id="tasks",
        ),
    ],
)
def test_a_line_ends_at_a_line_feed_alone(
    tmp_path: Path, read: Callable[[Path], Any], text: Callable[[Any], str]
) -> None:
    record = {"question": UNUSUAL, "answer": "#### 1"}
    found = read(write(tmp_path / "data.jsonl", record, record, record))
    assert text(found[0]) == UNUSUAL


def test_a_byte_order_mark_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"question": "1+1", "answer": "#### 2"}\r\n\r\n')
    assert [record.final_answer for record in read_jsonl(path)] == ["2"]


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"messages": [ASKED, SAID]}, id="messages"),
        pytest.param({"question": "hello", "answer": "world"}, id="question"),
        pytest.param({"prompt": "hello", "completion": "world"}, id="prompt"),
        pytest.param(
            {
                "conversations": [
                    {"from": "human", "value": "hello"},
                    {"from": "gpt", "value": "world"},
                ]
            },
            id="sharegpt",
        ),
        pytest.param(
            {"messages": [ASKED, {**SAID, "content": [{"type": "text", "text": "world"}]}]},
            id="parts",
        ),
    ],
)
def test_the_layouts_that_are_common_are_one_conversation(tmp_path: Path, record: object) -> None:
    [conversation] = read_conversations(write(tmp_path / "data.jsonl", record))
    assert conversation.messages == [ASKED, SAID]


def test_a_call_without_content_is_rendered_by_a_template_that_has_calls(tmp_path: Path) -> None:
    record = {"messages": [ASKED, CALLED, FOUND, SAID]}
    [conversation] = read_conversations(write(tmp_path / "data.jsonl", record))
    text = Tokenizer(make_files(CALLS)).render_chat_template(conversation.messages)
    assert "call search(tin)" in text
    assert "None" not in text
    # What is trained on renders as well, whether the call is the context or the answer.
    tokenizer = Tokenizer(make_files(CALLS))
    assert conversation.to_datum(tokenizer).loss_fn_inputs["weights"].sum() > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "data.jsonl cannot be read: No such file or directory", id="missing"),
        pytest.param("", "holds no conversation", id="empty"),
        pytest.param("no json\n", "data.jsonl:1: not JSON", id="not-json"),
        pytest.param('{"messages": [', "data.jsonl:1: not JSON", id="cut-off"),
        pytest.param('{"text": "a"}', "data.jsonl:1: a line with the keys text", id="keys"),
        pytest.param("[1]", "data.jsonl:1: a line is no conversation", id="not-an-object"),
        pytest.param(
            json.dumps({"messages": [ASKED]}), "data.jsonl:1: a conversation ends with", id="end"
        ),
        pytest.param(
            json.dumps({"messages": [ASKED, {"role": "assistant", "content": None}]}),
            "data.jsonl:1: a message of the assistant has no content",
            id="null",
        ),
        pytest.param(
            json.dumps({"messages": [ASKED, {**CALLED, "tool_calls": [{}]}]}),
            "data.jsonl:1: a tool call names no function",
            id="call",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_with_its_place(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_conversations(path)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_a_call_that_the_template_drops_is_refused_with_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "data.jsonl",
        {"messages": [ASKED, SAID]},
        {"messages": [ASKED, CALLED, FOUND, SAID]},
    )
    _, conversation = read_conversations(path)
    with pytest.raises(
        ConfigurationError, match=r"data\.jsonl:2: messages\.1\.tool_calls\.0 leaves"
    ):
        conversation.to_datum(Tokenizer(make_files(CHATML)))
