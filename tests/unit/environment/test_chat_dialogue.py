"""A model's calls by OpenAI's API as observations, and actions as its answers."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.pictures import picture

from tinsmith.environments.adapters.chat_dialogue import (
    ChatDialogue,
    DialogueError,
    completion,
    completion_chunk,
)
from tinsmith.environments.environment import Action, InvalidActionError, Message, Tool
from tinsmith.text.tool_notations import ToolCall

QUESTION = {"role": "user", "content": "2 + 3?"}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def asking(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


def test_only_what_is_new_is_shown() -> None:
    dialogue = ChatDialogue()
    first = dialogue.observe(asking({"role": "developer", "content": "Add."}, QUESTION))
    assert first.messages == (Message("system", "Add."), Message("user", "2 + 3?"))
    said = dialogue.answer(Action(text="6"))
    second = dialogue.observe(
        asking(
            {"role": "system", "content": "Add."},
            {"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]},
            said,
            {"role": "user", "content": "No."},
        )
    )
    assert second.messages == (Message("user", "No."),)


def test_calls_of_tools_and_their_answers() -> None:
    dialogue = ChatDialogue()
    first = dialogue.observe(asking(QUESTION, tools=[ADD]))
    assert first.tools == (Tool("add", "Adds.", {}),)
    calls = (ToolCall("add", '{"a": 2}', "c1"), ToolCall("add", '{"a": 3}'))
    said = dialogue.answer(Action(text="", tool_calls=calls))
    assert [call["id"] for call in said["tool_calls"]] == ["c1", "call_2"]
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": "5"}
        for call in said["tool_calls"]
    ]
    # What is sent again may have an empty content as null.
    sent = {**said, "content": None}
    second = dialogue.observe(asking(QUESTION, sent, *answers, tools=[ADD]))
    assert second.messages == tuple(
        Message("tool", "5", tool_call_id=each, name="add") for each in ("c1", "call_2")
    )
    assert second.tools == ()


def test_images_within_a_message_are_shown() -> None:
    image = picture(28, 28)
    url = f"data:image/png;base64,{base64.b64encode(image.data).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    shown = ChatDialogue().observe(asking({"role": "user", "content": parts}))
    assert shown.images == (image,)
    assert shown.messages[0].content == [{"type": "image"}, {"type": "text", "text": "What?"}]


def test_where_a_turn_ends_is_passed_on() -> None:
    assert ChatDialogue().observe(asking(QUESTION, stop="\n")).stop == ("\n",)
    assert ChatDialogue().observe(asking(QUESTION, stop=["a", "b"])).stop == ("a", "b")


def test_the_stop_that_ended_a_turn_is_no_part_of_the_answer() -> None:
    dialogue = ChatDialogue()
    dialogue.observe(asking(QUESTION, stop=["d", "nd", "</a>"]))
    assert dialogue.answer(Action(text="<a>5</a>"))["content"] == "<a>5"
    dialogue.observe(asking(QUESTION, {"role": "assistant", "content": "<a>5"}, QUESTION, stop="x"))
    assert dialogue.answer(Action(text="<a>5</a>"))["content"] == "<a>5</a>"


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        pytest.param(asking(QUESTION), "1 messages were dropped", id="dropped"),
        pytest.param(
            asking({"role": "user", "content": "Else?"}, {"role": "assistant", "content": "5"}),
            "message 0 of the conversation was changed",
            id="rewritten",
        ),
        pytest.param(
            asking(QUESTION, {"role": "assistant", "content": "6"}),
            "message 1 of the conversation was changed",
            id="said-otherwise",
        ),
        pytest.param(
            asking(QUESTION, {"role": "assistant", "content": "5"}, tools=[ADD]),
            "the tools were changed",
            id="tools",
        ),
    ],
)
def test_a_conversation_that_is_not_continued_is_refused(
    sent: dict[str, Any], problem: str
) -> None:
    dialogue = ChatDialogue()
    dialogue.observe(asking(QUESTION))
    dialogue.answer(Action(text="5"))
    with pytest.raises(DialogueError, match=problem):
        dialogue.observe(sent)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        pytest.param(asking(QUESTION, n=2), "2 answers", id="answers"),
        pytest.param(
            asking(QUESTION, tools=[ADD], tool_choice="required"), "tool_choice", id="choice"
        ),
        pytest.param(
            asking(QUESTION, response_format={"type": "json_object"}), "form", id="format"
        ),
        pytest.param({"model": "m", "messages": "x"}, "no list of objects", id="messages"),
        pytest.param(asking({"role": "user", "content": 3}), "neither text", id="content"),
        pytest.param(
            asking({"role": "user", "content": [{"type": "input_audio"}]}), "input_audio", id="part"
        ),
        pytest.param(
            asking(
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}],
                }
            ),
            "only PNG and JPEG",
            id="address",
        ),
        pytest.param(asking(QUESTION, tools=[{"type": "web_search"}]), "no", id="tool"),
        pytest.param(
            asking({"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}),
            "without arguments",
            id="call",
        ),
    ],
)
def test_what_is_no_turn_of_text_is_refused(sent: dict[str, Any], problem: str) -> None:
    with pytest.raises(DialogueError, match=problem):
        ChatDialogue().observe(sent)


def test_an_action_of_tokens_is_refused() -> None:
    with pytest.raises(InvalidActionError):
        ChatDialogue().answer(Action(tokens=(1, 2)))


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=5))
def test_each_message_is_shown_once(turns: list[tuple[str, str]]) -> None:
    dialogue = ChatDialogue()
    sent: list[Any] = [QUESTION]
    shown = list(dialogue.observe(asking(*sent)).messages)
    for said, answer in turns:
        sent += [dialogue.answer(Action(text=said)), {"role": "user", "content": answer}]
        shown += dialogue.observe(asking(*sent)).messages
    assert [each.content for each in shown] == ["2 + 3?", *(answer for _, answer in turns)]


def test_a_completion_and_its_stream_say_the_same() -> None:
    said = ChatDialogue().answer(Action(text="a", tool_calls=(ToolCall("add", "{}", "c1"),)))
    whole = completion(said, "m", 1)
    assert whole["choices"][0]["message"] == said
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    [choice] = completion_chunk(whole)["choices"]
    assert choice["delta"]["content"] == "a"
    assert choice["delta"]["tool_calls"] == [{"index": 0, **said["tool_calls"][0]}]
