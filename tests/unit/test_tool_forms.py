"""Forms of calls in each notation: whatever their masks let through, the parser reads as calls."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import tokenizers

from tinsmith.text.tool_forms import ToolRules, structural_tag
from tinsmith.text.tool_notations import (
    HERMES,
    LLAMA,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    ToolCall,
    ToolFormat,
    detect_format,
)
from tinsmith_engine.sampling.request.sample_request import OutputFormat
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_sampler.forms.grammars import Grammars
from tinsmith_sampler.forms.trials import FormTrials

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
END = "<|im_end|>"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMATS = {
    "hermes": HERMES,
    "mistral-list": MISTRAL_LIST,
    "mistral-named": MISTRAL_NAMED,
    "llama": LLAMA,
}
NUM_SAMPLES = 10
MAX_TOKENS = 400

TRIALS = FormTrials()


@pytest.fixture(autouse=True, scope="module")
def ended_trials() -> Iterator[None]:
    yield
    TRIALS.close()


class Writer:
    """Draws tokens at random, as far as a form lets them through."""

    def __init__(self, folder: Path, *, are_special: bool) -> None:
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        names = [END, *MARKS, *alphabet]  # The first six are tokens of their own.
        self._tokenizer = tokenizers.Tokenizer(
            tokenizers.models.BPE({name: number for number, name in enumerate(names)}, [])
        )
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self._tokenizer.add_special_tokens([END])
        add = self._tokenizer.add_special_tokens if are_special else self._tokenizer.add_tokens
        add(list(MARKS))
        (folder / "tokenizer.json").write_text(self._tokenizer.to_str())
        self._grammars = Grammars(TRIALS, folder, len(names), [0])
        self._vocab_size = len(names)

    async def draw(self, form: object, seed: int, *, marks: float = 1.0) -> str | None:
        """Return a text that a form lets through to its end; None if it did not end."""
        rng = random.Random(seed)
        grammar = await self._grammars.get(OutputFormat("structural_tag", json.dumps(form)))
        row = grammar.begin("p")
        tokens: list[int] = []
        for _ in range(MAX_TOKENS):
            words = row.words()
            assert words is not None
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocab_size]
            allowed = np.flatnonzero(bits).tolist()
            # Ends and marks are a few tokens among many: often enough they are taken.
            rare = [token for token in allowed if token <= len(MARKS)]
            is_rare = bool(rare) and rng.random() < marks
            token = rng.choice(rare if is_rare else allowed)
            row.note(token)
            if row.has_ended():
                return self._tokenizer.decode(tokens, skip_special_tokens=False)
            tokens.append(token)
        return None


@pytest.fixture(params=[False, True], ids=["text-marks", "special-marks"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Writer:
    return Writer(tmp_path, are_special=request.param)


def rules(*, must_call: bool, is_parallel: bool) -> ToolRules:
    schemas = {"first": SCHEMA, "sec-ond": SCHEMA}
    return ToolRules(schemas=schemas, must_call=must_call, is_parallel=is_parallel)


def calls_of(tool_format: ToolFormat, text: str) -> tuple[str, list[ToolCall]]:
    parser = tool_format.new_parser(["first", "sec-ond"])
    pieces = [*parser.push(text), *parser.finish()]
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


@pytest.mark.parametrize("is_parallel", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("name", FORMATS)
async def test_forced_calls_are_calls(writer: Writer, name: str, is_parallel: bool) -> None:
    tool_format = FORMATS[name]
    form = structural_tag(
        tool_format.notation, rules(must_call=True, is_parallel=is_parallel), None
    )
    numbers = set()
    for seed in range(NUM_SAMPLES):
        text = await writer.draw(form, seed, marks=0.5)
        if text is not None:
            rest, calls = calls_of(tool_format, text)
            assert not rest.strip(), text
            numbers.add(len(calls))
    assert numbers == {1} if not is_parallel else numbers >= {1, 2}


@pytest.mark.parametrize("is_parallel", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("name", FORMATS)
async def test_calls_in_free_text_keep_their_schema(
    writer: Writer, name: str, is_parallel: bool
) -> None:
    tool_format = FORMATS[name]
    form = structural_tag(
        tool_format.notation, rules(must_call=False, is_parallel=is_parallel), None
    )
    for seed in range(NUM_SAMPLES):
        text = await writer.draw(form, seed, marks=0.2)
        if text is not None:
            rest, calls = calls_of(tool_format, text)
            assert "<tool_call>" not in rest
            assert "[TOOL_CALLS]" not in rest or not tool_format.notation.opening
            assert is_parallel or len(calls) <= 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("no", "Expecting value", id="no-json"),
        pytest.param("[]", "missing or of a wrong type", id="a-list"),
        pytest.param('{"type": "structural_tag"}', "'format'", id="no-format"),
        pytest.param('{"type": "x", "format": {}}', "not 'structural_tag'", id="other-type"),
        pytest.param(
            '{"type": "structural_tag", "format": {"type": "qwen_xml"}}',
            "'qwen_xml' is not offered",
            id="other-format",
        ),
        pytest.param(
            '{"type": "structural_tag", "format": '
            + '{"type": "or", "elements": [' * 3000
            + "]}" * 3000
            + "}",
            "is no structural_tag",
            id="deep",
        ),
    ],
)
async def test_what_is_no_structural_tag_is_refused(
    tmp_path: Path, source: str, words: str
) -> None:
    Writer(tmp_path, are_special=False)
    grammars = Grammars(TRIALS, tmp_path, 262, [0])
    with pytest.raises(InvalidFieldError, match=words):
        await grammars.get(OutputFormat("structural_tag", source))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param("tools <tool_call>", HERMES, id="hermes"),
        pytest.param("tools [TOOL_CALLS]", MISTRAL_LIST, id="mistral-list"),
        pytest.param("tools [TOOL_CALLS] [ARGS]", MISTRAL_NAMED, id="mistral-named"),
        pytest.param('tools "name"', None, id="half-a-llama"),
        pytest.param('tools "name" "parameters"', LLAMA, id="llama"),
    ],
)
def test_the_template_tells_the_notation(template: str, expected: ToolFormat | None) -> None:
    assert detect_format(template) is expected
