from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.rollouts.fakes import (
    CharTokenizer,
    SpacedTokenizer,
    ThinkingTokenizer,
    TrimmingTokenizer,
)

from tinsmith.rollouts import ChatTemplateError, Conversation, TemplateRewritesHistoryError

plain_texts = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=12)
words = plain_texts.filter(lambda text: text == text.strip())


def encode(tokenizer: CharTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@given(first=plain_texts, turns=st.lists(st.tuples(plain_texts, plain_texts, st.booleans())))
def test_the_context_is_the_template_of_the_whole_conversation(
    first: str, turns: list[tuple[str, str, bool]]
) -> None:
    """Whether turns were cut off or not, appended tokens equal the template of all messages."""
    tokenizer = CharTokenizer()
    conversation = Conversation(tokenizer)
    context = list(conversation.begin(user(first)).tokens)
    messages = user(first)
    for said, shown, is_cut in turns:
        sampled = encode(tokenizer, said + ("" if is_cut else "<|im_end|>"))
        text = conversation.add_turn(sampled, "length" if is_cut else "stop")
        continuation = conversation.add_observation(user(shown))
        before = list(context)
        context += [*sampled, *continuation.tokens]
        messages += [{"role": "assistant", "content": said}, *user(shown)]
        assert text == said
        assert not continuation.starts_sample
        assert context[: len(before)] == before
        rendered = tokenizer.render_chat_template(messages, add_generation_prompt=True)
        assert context == encode(tokenizer, rendered)


@given(said=plain_texts, is_cut=st.booleans())
def test_a_template_that_trims_keeps_the_tokens_as_sampled(said: str, is_cut: bool) -> None:
    tokenizer = TrimmingTokenizer()
    conversation = Conversation(tokenizer)
    conversation.begin(user("q"))
    conversation.add_turn(
        encode(tokenizer, said + ("" if is_cut else "<|im_end|>")), "length" if is_cut else "stop"
    )
    tail = "" if not is_cut else "<|im_end|>"
    expected = tail + "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(conversation.add_observation(user("ok")).tokens) == expected


@pytest.mark.parametrize(
    ("said", "stop_reason", "expected"),
    [
        pytest.param("hi<|eot|>", "stop", "user: ok\nassistant: ", id="ended"),
        pytest.param("hi <|eot|>", "stop", "user: ok\nassistant: ", id="ended-with-the-space"),
        pytest.param("hi", "length", " <|eot|>user: ok\nassistant: ", id="cut-off"),
        pytest.param("hi ", "length", " <|eot|>user: ok\nassistant: ", id="cut-at-a-space"),
        pytest.param("hi<|eot|>", "length", "user: ok\nassistant: ", id="ended-at-the-limit"),
        pytest.param("hi!", "stop", " <|eot|>user: ok\nassistant: ", id="stop-string"),
    ],
)
def test_the_end_of_a_turn_is_there_once(said: str, stop_reason: str, expected: str) -> None:
    tokenizer = SpacedTokenizer()
    conversation = Conversation(tokenizer)
    conversation.begin(user("q"))
    conversation.add_turn(encode(tokenizer, said), stop_reason)
    assert tokenizer.decode(conversation.add_observation(user("ok")).tokens) == expected


def test_a_turn_that_ends_in_the_line_break_of_the_template_was_cut_off() -> None:
    tokenizer = CharTokenizer()
    conversation = Conversation(tokenizer)
    conversation.begin(user("q"))
    assert conversation.add_turn(encode(tokenizer, "hi\n"), "length") == "hi\n"
    tokens = conversation.add_observation(user("ok")).tokens
    assert tokenizer.decode(tokens).startswith("<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize(
    ("said", "text", "expected"),
    [
        pytest.param("hi\n", "hi\n", "<|im_end|>\n<|im_start|>user", id="line-break"),
        pytest.param("hi<|im_end|>", "hi", "\n<|im_start|>user", id="end-of-turn"),
        pytest.param("hi<|eot|>", "hi<|eot|>", "<|im_end|>\n<|im_start|>user", id="special"),
    ],
)
def test_a_turn_that_a_stop_may_end_has_the_end_of_the_template_once(
    said: str, text: str, expected: str
) -> None:
    tokenizer = CharTokenizer()
    conversation = Conversation(tokenizer)
    conversation.begin(user("q"))
    assert conversation.add_turn(encode(tokenizer, said), "stop", has_stops=True) == text
    tokens = conversation.add_observation(user("ok")).tokens
    assert tokenizer.decode(tokens).startswith(expected)


def test_a_stop_within_an_end_of_plain_text_is_no_end_of_turn() -> None:
    class WordyTokenizer(SpacedTokenizer):
        """Ends turns with a word."""

        def render_message(self, messages: Sequence[Mapping[str, Any]], index: int) -> str:
            return f"{messages[index]['role']}: {messages[index]['content']}END\n"

    tokenizer = WordyTokenizer()
    conversation = Conversation(tokenizer)
    conversation.begin(user("q"))
    assert conversation.add_turn(encode(tokenizer, "AD"), "stop", has_stops=True) == "AD"
    tokens = conversation.add_observation(user("ok")).tokens
    assert tokenizer.decode(tokens).startswith("END\nuser: ok")


def test_a_stop_that_begins_the_end_of_the_template_counts_as_its_beginning() -> None:
    tokenizer = SpacedTokenizer()
    conversation = Conversation(tokenizer)
    conversation.begin(user("q"))
    assert conversation.add_turn(encode(tokenizer, "hi "), "stop", has_stops=True) == "hi"
    tokens = conversation.add_observation(user("ok")).tokens
    assert tokenizer.decode(tokens) == "<|eot|>user: ok\nassistant: "


def test_a_rewritten_history_is_an_error_that_names_the_remedy() -> None:
    tokenizer = ThinkingTokenizer()
    conversation = Conversation(tokenizer)
    conversation.begin(user("q"))
    conversation.add_turn(encode(tokenizer, "hm</think>hi<|im_end|>"), "stop")
    with pytest.raises(TemplateRewritesHistoryError, match="split_turns=True"):
        conversation.add_observation(user("ok"))


def test_a_rewritten_history_splits_the_sample_if_asked() -> None:
    tokenizer = ThinkingTokenizer()
    conversation = Conversation(tokenizer, split_turns=True)
    conversation.begin(user("q"))
    conversation.add_turn(encode(tokenizer, "hm</think>hi<|im_end|>"), "stop")
    continuation = conversation.add_observation(user("ok"))
    assert continuation.starts_sample
    assert tokenizer.decode(continuation.tokens) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
        "<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    )
    # The second turn hides nothing, so it goes on in the same sample.
    conversation.add_turn(encode(tokenizer, "yes<|im_end|>"), "stop")
    assert not conversation.add_observation(user("bye")).starts_sample


def test_a_rewritten_history_is_appended_if_asked() -> None:
    tokenizer = ThinkingTokenizer()
    conversation = Conversation(tokenizer, append_only=True)
    conversation.begin(user("q"))
    conversation.add_turn(encode(tokenizer, "hm</think>hi<|im_end|>"), "stop")
    continuation = conversation.add_observation(user("ok"))
    assert not continuation.starts_sample
    assert tokenizer.decode(continuation.tokens) == (
        "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    )


@given(said=words, shown=plain_texts)
def test_words_that_equal_the_placeholder_are_no_trouble(said: str, shown: str) -> None:
    tokenizer = CharTokenizer()
    conversation = Conversation(tokenizer)
    conversation.begin(user("TinsmithTurnPlaceholder"))
    conversation.add_turn(encode(tokenizer, f"TinsmithTurnPlaceholder{said}<|im_end|>"), "stop")
    tokens = conversation.add_observation(user(f"TinsmithTurnPlaceholderX{shown}")).tokens
    assert tokenizer.decode(tokens) == (
        f"\n<|im_start|>user\nTinsmithTurnPlaceholderX{shown}<|im_end|>\n<|im_start|>assistant\n"
    )


class RefusingTokenizer(CharTokenizer):
    def render_message(self, messages: object, index: int) -> str:
        raise ValueError("roles must alternate")


def test_a_template_that_refuses_is_named() -> None:
    with pytest.raises(ChatTemplateError, match=r"roles user: roles must alternate"):
        Conversation(RefusingTokenizer()).begin(user("q"))
