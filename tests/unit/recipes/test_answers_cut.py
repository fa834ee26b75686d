"""Where the text of a conversation is cut into what is read and what is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.chat_models import QWEN3, tokenizer_files
from tests.fakes.family_templates import (
    CHATML,
    DEEPSEEK_R1,
    NEMOTRON,
    QWEN3_FIRST,
    QWEN3_THINKING,
)

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.tasks.conversations import (
    ALL,
    LAST,
    Conversation,
    conversation_to_datum,
    read_conversations,
)
from tinsmith.recipes.tasks.lengths import CUT, LEAVE_OUT, REFUSE, fit_length
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import Datum

END = "<|im_end|>"
ASKED = {"role": "user", "content": "q"}


def tokenizer_of(template: str, **config: str) -> Tokenizer:
    """Return a tokenizer in which two line breaks are one token, as in most real ones."""
    files = tokenizer_files(template)
    document = json.loads(files["tokenizer.json"])
    letters = document["model"]["vocab"]
    letters["ĊĊ"] = len(letters)
    for added in document["added_tokens"]:
        added["id"] += 1
    document["model"]["merges"] = [["Ċ", "Ċ"]]
    settings = json.loads(files["tokenizer_config.json"]) | config
    return Tokenizer(
        {
            "tokenizer.json": json.dumps(document).encode(),
            "tokenizer_config.json": json.dumps(settings).encode(),
        }
    )


def say(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def read_and_trained(datum: Datum, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """Return the tokens before the first that is trained on, and the text of those that are."""
    targets = [int(token) for token in datum.loss_fn_inputs["target_tokens"]]
    weights = [float(weight) for weight in datum.loss_fn_inputs["weights"]]
    first = next(index for index, weight in enumerate(weights) if weight)
    trained = [token for token, weight in zip(targets, weights, strict=True) if weight]
    return [datum.model_input.to_ints()[0], *targets[:first]], tokenizer.decode(trained)


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        pytest.param(CHATML, say("\na"), f"\na{END}", id="begins-with-a-line-break"),
        pytest.param(CHATML, say("\n\n a"), f"\n\n a{END}", id="begins-with-two"),
        pytest.param(CHATML, say(f"a {END} b"), f"a {END} b{END}", id="mark-inside"),
        pytest.param(QWEN3_THINKING, say("a"), f"\n</think>\n\na{END}", id="without-a-thought"),
        pytest.param(
            QWEN3_THINKING, say("a", reasoning_content="t"), f"t\n</think>\n\na{END}", id="thought"
        ),
        pytest.param(QWEN3, say("a"), f"<think>\n\n</think>\n\na{END}", id="thinks-by-itself"),
        pytest.param(
            NEMOTRON, say("a", reasoning_content="t"), f"t\n</think>\na{END}", id="thinks-first"
        ),
    ],
)
def test_an_answer_is_what_a_sampler_continues_its_prompt_with(
    template: str, answer: dict[str, Any], expected: str
) -> None:
    tokenizer = tokenizer_of(template)
    datum = conversation_to_datum(tokenizer, [ASKED, answer])
    prompt = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True)
    assert read_and_trained(datum, tokenizer) == (prompt, expected)


@pytest.mark.parametrize("template", [DEEPSEEK_R1, NEMOTRON])
def test_a_template_that_writes_another_prompt_before_an_answer_is_refused(template: str) -> None:
    conversation = Conversation([ASKED, say("a")], None, "rows:3")
    with pytest.raises(ConfigurationError, match="rows:3: the chat template rewrites the prompt"):
        conversation.to_datum(tokenizer_of(template))


def test_the_end_of_a_turn_is_trained_on_where_texts_end_otherwise() -> None:
    tokenizer = tokenizer_of(CHATML, eos_token="<|endoftext|>")
    datum = conversation_to_datum(tokenizer, [ASKED, say("a")])
    assert read_and_trained(datum, tokenizer)[1] == f"a{END}"
    assert tokenizer.turn_ends == ("<|endoftext|>", END)


ROUNDS = [ASKED, say("one"), ASKED, say("two"), ASKED, say("three")]


@pytest.mark.parametrize(
    ("train_on", "weights", "expected"),
    [
        (LAST, None, [f"three{END}"]),
        (ALL, None, [f"one{END}two{END}three{END}"]),
        (LAST, [0.0, 1.0, 0.0, 0.0, 0.0, 1.0], [f"one{END}three{END}"]),
        (ALL, [0.0, 0.0, 0.0, 0.5, 0.0, 0.0], [f"two{END}"]),
    ],
)
def test_which_turns_are_trained_on(
    train_on: str, weights: list[float] | None, expected: list[str]
) -> None:
    tokenizer = tokenizer_of(CHATML)
    data = Conversation(ROUNDS, None, "x", weights).to_data(tokenizer, train_on)
    assert [read_and_trained(datum, tokenizer)[1] for datum in data] == expected
    if weights is not None:
        given = {float(each) for datum in data for each in datum.loss_fn_inputs["weights"]}
        assert given == set(weights)


def test_each_answer_is_its_own_datum_where_the_template_hides_former_thoughts() -> None:
    tokenizer = tokenizer_of(QWEN3_FIRST)
    rounds = [
        ASKED,
        say("one", reasoning_content="THOUGHT"),
        ASKED,
        say("two", reasoning_content="MORE"),
    ]
    data = Conversation(rounds, None, "x").to_data(tokenizer, ALL)
    trained = [read_and_trained(datum, tokenizer)[1] for datum in data]
    assert trained == [
        f"<think>\nTHOUGHT\n</think>\n\none{END}",
        f"<think>\nMORE\n</think>\n\ntwo{END}",
    ]
    prompt = tokenizer.apply_chat_template(rounds[:3], add_generation_prompt=True)
    assert read_and_trained(data[1], tokenizer)[0] == prompt


def test_a_line_that_is_longer_than_the_context_is_refused_left_out_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [ASKED, say("w" * 100)]}) + "\n")
    [conversation] = read_conversations(path)
    tokenizer = tokenizer_of(CHATML)
    data = conversation.to_data(tokenizer)
    num_tokens = len(data[0].model_input.to_ints())

    def fit(max_tokens: int, too_long: str) -> list[Datum]:
        return fit_length(data, conversation.where, max_tokens=max_tokens, too_long=too_long)

    assert fit(num_tokens, REFUSE) == data
    message = f"rows.jsonl:1: has {num_tokens} tokens, and the model's context 60"
    with pytest.raises(ConfigurationError, match=message):
        fit(60, REFUSE)
    assert fit(60, LEAVE_OUT) == []
    [cut] = fit(60, CUT)
    assert len(cut.model_input.to_ints()) == len(cut.loss_fn_inputs["weights"]) == 60
    assert read_and_trained(cut, tokenizer)[1].strip("w") == ""
    assert fit(5, CUT) == []
