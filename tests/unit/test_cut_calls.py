"""Forced calls that are cut: at each letter, in each notation, whole calls and half of the last."""

from __future__ import annotations

import json

import pytest

from tinsmith.text.cut_calls import read_cut_calls
from tinsmith.text.tool_notations import (
    HERMES,
    LLAMA,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    ToolCall,
    ToolFormat,
)

NAMES = ["add", "add_all"]
CALLS = [ToolCall("add_all", '{"a": [1, 2]}'), ToolCall("add", '{"text": "}]<x>"}')]
FORMATS = [
    pytest.param(HERMES, id="hermes"),
    pytest.param(MISTRAL_LIST, id="mistral-list"),
    pytest.param(MISTRAL_NAMED, id="mistral-named"),
    pytest.param(LLAMA, id="llama"),
]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_at_each_letter_the_calls_so_far_are_read(tool_format: ToolFormat) -> None:
    notation = tool_format.notation
    written = [
        f"{notation.begin}{call.name}{notation.middle}{call.arguments}{notation.end}"
        for call in CALLS
    ]
    text = notation.opening + notation.separator.join(written)
    counts = []
    for end in range(len(text)):
        found = read_cut_calls(text[:end], notation, NAMES)
        counts.append(len(found))
        for call, whole in zip(found, CALLS, strict=False):
            assert call.name == whole.name
            assert call.arguments
            assert whole.arguments.startswith(call.arguments)
        for call in found[:-1]:
            json.loads(call.arguments)
    assert sorted(set(counts)) == [0, 1, 2]
    assert counts == sorted(counts)


def test_a_name_that_is_not_offered_is_no_call() -> None:
    notation = HERMES.notation
    text = f"{notation.begin}delete{notation.middle}" + '{"a": 1'
    assert read_cut_calls(text, notation, NAMES) == []
