"""Text leaves piece by piece, and is the text of all tokens in the end."""

from __future__ import annotations

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fakes.scripted_sampler import tokenizer_files

from tinsmith.text.tokenizer import Tokenizer
from tinsmith_runtime.text.detokenizer import IncrementalDetokenizer, StopFilter

BYTES = Tokenizer(tokenizer_files())


def _byte_tokens() -> dict[int, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return {byte: BYTES.token_to_id(letter) or 0 for byte, letter in letters.items()}


def pieces_of(tokens: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(BYTES.decode)
    return [*(detokenizer.push([token]) for token in tokens), detokenizer.finish()]


@given(st.text())
@example("naïve 日本 → 👩‍👩‍👧 hello\ufffd!")
def test_characters_are_never_split(text: str) -> None:
    pieces = pieces_of(BYTES.encode(text))
    assert "".join(pieces) == text
    # A character leaves with its last byte, and not later.
    assert [piece for piece in pieces if piece] == [*text] or "\ufffd" in text


@given(st.binary())
@example(b"\x80" * 300)
@example("日".encode() * 3 + b"\xe6\x97" + b"\xf0\x9f" * 80 + b"ok")
@example(b"\xe6" * 100 + "日本".encode())
def test_any_bytes_are_decoded_as_all_at_once(content: bytes) -> None:
    table = _byte_tokens()
    tokens = [table[byte] for byte in content]
    assert "".join(pieces_of(tokens)) == BYTES.decode(tokens)


def test_bytes_that_never_become_text_do_not_pile_up() -> None:
    lengths = []

    def decode(tokens: list[int]) -> str:
        lengths.append(len(tokens))
        return BYTES.decode(tokens)

    detokenizer = IncrementalDetokenizer(decode)
    text = detokenizer.push([_byte_tokens()[0x80]] * 1000)
    assert text.count("\ufffd") >= 990
    assert max(lengths) < 100


def test_byte_fallback_and_leading_spaces() -> None:
    # As Llama 2 and Gemma write it: spaces as a letter of their own, unknown characters as bytes.
    vocabulary = {"▁he": 0, "llo": 1, "▁": 2, "<0xE6>": 3, "<0x97>": 4, "<0xA5>": 5, "▁world": 6}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    model.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokens = [0, 1, 6, 2, 3, 4, 5, 3, 4, 5, 6]
    detokenizer = IncrementalDetokenizer(model.decode)
    pieces = [detokenizer.push([token]) for token in tokens]
    assert pieces == ["he", "llo", " world", " ", "", "", "日", "", "", "日", " world"]
    assert detokenizer.finish() == ""


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_no_stop_string_leaves_and_nothing_else_is_lost(parts: list[str], stops: list[str]) -> None:
    filter_ = StopFilter(stops)
    left = "".join([*(filter_.push(part) for part in parts), filter_.finish()])
    text = "".join(parts)
    ends = [text.find(stop) for stop in stops if stop in text]
    assert filter_.is_stopped == bool(ends)
    if not ends:
        assert left == text
    else:
        # Text is cut at the first stop string to be whole, which may not be the first to begin.
        assert text.startswith(left)
        assert any(text[len(left) :].startswith(stop) for stop in stops)
        assert not any(stop in left for stop in stops)


def test_the_first_of_several_stops_ends_a_text() -> None:
    filter_ = StopFilter(["a", "b"])
    assert filter_.push("xbya") == "x"
    assert filter_.stopped_by == "b"


def test_only_a_possible_beginning_of_a_stop_is_held_back() -> None:
    filter_ = StopFilter(["</end>"])
    assert [filter_.push(text) for text in ("a<", "b</e", "nd", "> rest")] == ["a", "<b", "", ""]
    assert filter_.is_stopped
