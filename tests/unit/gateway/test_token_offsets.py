"""Offsets of tokens are places in the text of the choice, for each manner of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.scripted_sampler import tokenizer_files
from tests.unit.gateway.test_sentencepiece_texts import PIECES, SP, SPACED, THE

from tinsmith_gateway.openai.text.token_offsets import SampleOffsets, prompt_offsets
from tinsmith_gateway.tokenizing.model_tokenizer import ModelTokenizer

BYTES = ModelTokenizer(tokenizer_files())
BEGIN = PIECES.index("<s>")
TEXTS = st.text(st.sampled_from("adefhint. äß漢🙂"), min_size=1, max_size=12)


def written(tokenizer: ModelTokenizer, tokens: list[int], offsets: list[int], text: str) -> None:
    """Check that between its offset and the next each token stands, as far as it is text."""
    assert offsets == sorted(offsets)
    assert (
        "".join(text[a:b] for a, b in zip(offsets, [*offsets[1:], len(text)], strict=True))
        == (text[offsets[0] :])
    )
    for token, begin, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
        content = tokenizer.text_of(token)
        if not content.startswith("bytes:") and begin < end:
            assert text[begin:end] in (content, content.lstrip(" "))


@pytest.mark.parametrize("tokenizer", [SP, BYTES], ids=["sentencepiece", "byte-level"])
@given(prompt=TEXTS, said=TEXTS)
def test_tokens_stand_at_their_offsets_in_the_whole_text(
    tokenizer: ModelTokenizer, prompt: str, said: str
) -> None:
    asked = tokenizer.encode(prompt, add_special_tokens=False)
    sampled = tokenizer.encode(said, add_special_tokens=False)
    decode = tokenizer.decoder(skip_special=True)
    text = tokenizer.decode(asked)
    whole = text + decode(sampled)
    begins = prompt_offsets(asked, text, tokenizer.decode)
    counter = SampleOffsets(decode, len(text))
    # As a stream brings them, or all at once.
    follows = counter.push(sampled[:1]) + counter.push(sampled[1:])
    assert follows == SampleOffsets(decode, len(text)).push(sampled)
    written(tokenizer, asked + sampled, begins + follows, whole)


def test_a_first_space_and_a_token_before_every_text_take_no_room() -> None:
    text = SP.decode([SPACED, THE])
    assert text == "thethe"
    assert prompt_offsets([BEGIN, SPACED, THE], text, SP.decode) == [0, 0, 3]
    behind = SampleOffsets(SP.decoder(skip_special=True), len(text))
    assert behind.push([SPACED, SPACED]) == [6, 10]
