"""Turns as tokens with a real byte-level BPE and ChatML, through `tinsmith.Tokenizer`."""

from __future__ import annotations

import json
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

import tinsmith
from tinsmith.rollouts import Conversation
from tinsmith_local.tiny_model import CHAT_TEMPLATE, TURN_END, train_tokenizer

texts = st.text(st.characters(codec="utf-8"), max_size=20)


@cache
def tokenizer() -> tinsmith.Tokenizer:
    trained = train_tokenizer(("user\n", "assistant\n", "hello there, how are you"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": TURN_END}
    return tinsmith.Tokenizer(
        {
            "tokenizer.json": trained.to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        }
    )


@given(turns=st.lists(st.tuples(texts, texts, st.booleans()), max_size=4))
def test_the_context_reads_as_the_template_and_its_prefix_never_changes(
    turns: list[tuple[str, str, bool]],
) -> None:
    tok = tokenizer()
    end = tok.encode(TURN_END, add_special_tokens=False)
    messages = [{"role": "user", "content": "hello"}]
    conversation = Conversation(tok)
    context = list(conversation.begin(messages).tokens)
    assert context == tok.apply_chat_template(messages, add_generation_prompt=True)
    for said, shown, is_cut in turns:
        # Letter by letter: a tokenisation that encoding the text again would not give.
        sampled = [t for letter in said for t in tok.encode(letter, add_special_tokens=False)]
        sampled += [] if is_cut else end
        conversation.add_turn(sampled, "length" if is_cut else "stop")
        suffix = conversation.add_observation([{"role": "user", "content": shown}]).tokens
        context += [*sampled, *suffix]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]
    assert tok.decode(context) == tok.render_chat_template(messages, add_generation_prompt=True)
