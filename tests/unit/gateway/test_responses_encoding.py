"""Responses of the Responses API say what was asked for, and what they leave to their defaults."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tinsmith_gateway.openai.responses.bodies import ResponsesBody
from tinsmith_gateway.openai.responses.encoding import Head, call_item, logprobs_of, whole_response

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 2},
}
CALL = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}


def head(**fields: Any) -> Head:
    body = ResponsesBody.model_validate({"input": "hi", **fields})
    return Head(id="1", model="m", created_at=5.0, body=body)


def answered(finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    """Return the response that a chat completion is."""
    said = {"content": "hello", **message}
    choice = {"finish_reason": finish_reason, "message": said, "logprobs": None}
    return whole_response(head(), {"choices": [choice], "usage": USAGE})


def test_what_is_left_out_is_told_by_its_default() -> None:
    told = head().encode("in_progress")
    assert told == {
        "id": "resp_1",
        "object": "response",
        "created_at": 5.0,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": "m",
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
    }


def test_what_is_asked_for_is_told_again() -> None:
    schema = {"type": "object"}
    tool = {"type": "function", "name": "add", "parameters": schema}
    form = {"type": "json_schema", "name": "f", "schema": schema, "strict": True}
    fields: dict[str, Any] = {
        "instructions": "Be kind.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.0,
        "top_p": 0.0,
        "tool_choice": "required",
        "top_logprobs": 4,
    }
    told = head(**fields, tools=[tool, {**tool, "strict": True}], text={"format": form}).encode(
        "failed", error={"code": "server_error"}
    )
    assert {name: told[name] for name in fields} == fields
    assert [each["strict"] for each in told["tools"]] == [False, True]
    assert told["tools"][0]["parameters"] == schema
    assert told["text"] == {"format": form}
    assert (told["status"], told["error"]) == ("failed", {"code": "server_error"})


def test_a_whole_answer_is_a_message_with_its_usage() -> None:
    begin_s = time.time()
    told = answered()
    assert begin_s <= told["completed_at"] <= time.time()
    (item,) = told["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["id"].startswith("msg_")
    assert item["content"] == [
        {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    ]
    usage = told["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 3, 10)
    assert usage["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_an_answer_at_its_limit_is_incomplete_and_not_completed() -> None:
    told = answered("length")
    assert (told["status"], told["completed_at"]) == ("incomplete", None)
    assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("message", "kinds"),
    [
        pytest.param({"content": ""}, ["message"], id="nothing-is-a-message"),
        pytest.param({"content": None, "tool_calls": [CALL]}, ["function_call"], id="calls-alone"),
        pytest.param(
            {"tool_calls": [CALL, CALL]}, ["message", "function_call", "function_call"], id="both"
        ),
    ],
)
def test_calls_are_items_behind_the_text(message: dict[str, Any], kinds: list[str]) -> None:
    output = answered(**message)["output"]
    assert [item["type"] for item in output] == kinds
    assert len({item["id"] for item in output}) == len(kinds)


def test_a_call_that_is_cut_is_incomplete() -> None:
    whole = call_item("fc_1", CALL)
    assert whole == {
        "id": "fc_1",
        "type": "function_call",
        "status": "completed",
        "call_id": "c1",
        "name": "add",
        "arguments": '{"a": 1}',
    }
    cut = {"id": "c1", "function": {"name": "add", "arguments": '{"a": '}}
    assert call_item("fc_1", cut)["status"] == "incomplete"


def test_scores_are_told_without_what_has_no_bytes() -> None:
    other = {"token": "b", "bytes": None, "logprob": -1.0}
    entry = {"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": [other]}
    assert logprobs_of({"content": [entry]}) == [
        {**entry, "top_logprobs": [{**other, "bytes": []}]}
    ]
    assert logprobs_of(None) == []
