"""Calls of tools in what a model wrote."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.text.tool_notations import (
    HERMES,
    LLAMA,
    MISTRAL_LIST,
    Piece,
    ToolCall,
    ToolFormat,
    detect_format,
)

TOOLS = ["add", "look_up"]
ADD = ToolCall("add", '{"a": 1,  "b": [2]}')
LOOK = ToolCall("look_up", "{}")


def parse(tool_format: ToolFormat, text: str, size: int = 0) -> list[Piece]:
    """Parse a text in pieces of a size, 0 for whole, and join neighbouring text."""
    parser = tool_format.new_parser(TOOLS)
    parts = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


HERMES_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": [2]}}\n</tool_call>'
HERMES_LOOK = '<tool_call>{"arguments": {}, "name": "look_up"}</tool_call>'

CASES = [
    pytest.param(HERMES, HERMES_ADD, [ADD], id="hermes"),
    pytest.param(HERMES, f"Well.\n{HERMES_ADD}", ["Well.", ADD], id="hermes-text-before"),
    pytest.param(HERMES, f"Well.\n\n{HERMES_ADD}", ["Well.\n", ADD], id="hermes-one-break-is-mark"),
    pytest.param(HERMES, f"{HERMES_ADD}\n{HERMES_LOOK}\n", [ADD, LOOK], id="hermes-several"),
    pytest.param(HERMES, f"{HERMES_ADD}\n\nso", [ADD, "\n\nso"], id="hermes-text-after"),
    pytest.param(HERMES, f"{HERMES_ADD} \n<to", [ADD, " \n<to"], id="hermes-half-a-mark"),
    pytest.param(HERMES, HERMES_ADD.removesuffix("\n</tool_call>"), [ADD], id="hermes-not-closed"),
    pytest.param(HERMES, HERMES_ADD[:-20], [HERMES_ADD[:-20]], id="hermes-cut-off"),
    pytest.param(
        HERMES,
        f"<tool_call>no</tool_call>{HERMES_LOOK}",
        ["<tool_call>no</tool_call>", LOOK],
        id="hermes-malformed",
    ),
    pytest.param(
        HERMES,
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        ['<tool_call>{"name": "add", "arguments": [1]}</tool_call>'],
        id="hermes-no-object",
    ),
    pytest.param(
        HERMES,
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        ['<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'],
        id="hermes-no-name",
    ),
    pytest.param(
        MISTRAL_LIST,
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1,  "b": [2]}}, '
        '{"name": "look_up", "arguments": {}}]',
        [ADD, LOOK],
        id="mistral-list",
    ),
    pytest.param(
        MISTRAL_LIST,
        'Hm.[TOOL_CALLS]add[ARGS]{"a": 1,  "b": [2]}[TOOL_CALLS]look_up[ARGS]{}',
        ["Hm.", ADD, LOOK],
        id="mistral-named",
    ),
    pytest.param(MISTRAL_LIST, "[TOOL_CALLS]", ["[TOOL_CALLS]"], id="mistral-none"),
    pytest.param(MISTRAL_LIST, "[TOOL_CALLS][1]", ["[TOOL_CALLS][1]"], id="mistral-malformed"),
    pytest.param(MISTRAL_LIST, "see [TOOL", ["see [TOOL"], id="mistral-half-a-mark"),
    pytest.param(
        LLAMA,
        ' {"name": "add", "parameters": {"a": 1,  "b": [2]}}',
        [ADD],
        id="llama",
    ),
    pytest.param(
        LLAMA,
        '<|python_tag|>{"name": "add", "parameters": {"a": 1,  "b": [2]}}; '
        '{"name": "look_up", "parameters": {}}',
        [ADD, LOOK],
        id="llama-several",
    ),
    pytest.param(
        LLAMA,
        '{"name": "Ada", "parameters": {}}',
        ['{"name": "Ada", "parameters": {}}'],
        id="llama-json-that-is-no-call",
    ),
    pytest.param(LLAMA, "I say {}", ["I say {}"], id="llama-text"),
    pytest.param(LLAMA, "<|pyth", ["<|pyth"], id="llama-half-a-mark"),
]


@pytest.mark.parametrize(("tool_format", "text", "expected"), CASES)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
def test_calls_are_found_however_the_text_comes(
    tool_format: ToolFormat, text: str, expected: list[Piece], size: int
) -> None:
    assert parse(tool_format, text, size) == expected


_FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "{",
    "}",
    '"name"',
    ":",
    ",",
    "\n",
    "x",
]


@given(st.lists(st.sampled_from([*_FRAGMENTS, HERMES_LOOK])), st.integers(1, 9))
def test_a_text_reads_the_same_whole_and_in_pieces(fragments: list[str], size: int) -> None:
    text = "".join(fragments)
    for tool_format in (HERMES, MISTRAL_LIST, LLAMA):
        assert parse(tool_format, text, size) == parse(tool_format, text)


@given(st.text())
def test_text_without_marks_is_left_alone(text: str) -> None:
    assert "".join(str(piece) for piece in parse(HERMES, text)) == text


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none()), st.booleans())
def test_arguments_are_the_models_own_characters(
    arguments: dict[str, object], is_ascii: bool
) -> None:
    written = json.dumps(arguments, ensure_ascii=is_ascii)
    (call,) = parse(HERMES, f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>')
    if "</tool_call>" not in written:
        assert call == ToolCall("add", written)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param("{% for tool in tools %}<tool_call>{% endfor %}", HERMES, id="hermes"),
        pytest.param("{% if tools %}<tool_call><function={% endif %}", None, id="xml"),
        pytest.param("{{ tools }}[TOOL_CALLS]", MISTRAL_LIST, id="mistral"),
        pytest.param('{{ tools }}{"name": x, "parameters": y}', LLAMA, id="llama"),
        pytest.param("<tool_call>", None, id="no-tools"),
        pytest.param("{{ tools }}", None, id="unknown"),
    ],
)
def test_the_template_says_the_convention(template: str, expected: ToolFormat | None) -> None:
    assert detect_format(template) is expected


def test_mistral_ids_have_nine_letters() -> None:
    assert len(MISTRAL_LIST.new_id()) == 9
    assert MISTRAL_LIST.new_id().isalnum()
    assert HERMES.new_id() != HERMES.new_id()
