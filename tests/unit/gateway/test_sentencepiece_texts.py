"""Texts of a tokenizer in the manner of SentencePiece, whose spaces belong to the word behind."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tinsmith_gateway.tokenizing.model_tokenizer import ModelTokenizer
from tinsmith_runtime.text.detokenizer import IncrementalDetokenizer

LETTERS = list("adefhinoht.")
PIECES = [
    *("<unk>", "<s>", "</s>"),
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *dict.fromkeys(["\u2581", *LETTERS]),
    *("th", "the", "\u2581t", "\u2581th", "\u2581the"),
]
MERGES = [("t", "h"), ("th", "e"), ("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")]
THE, SPACED = PIECES.index("the"), PIECES.index("\u2581the")


def files() -> dict[str, bytes]:
    vocabulary = {piece: token for token, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in PIECES[:3]])
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": b"{}"}


SP = ModelTokenizer(files())


@pytest.mark.parametrize("skip_special", [False, True])
def test_the_first_space_behind_a_prompt_is_kept(skip_special: bool) -> None:
    decode = SP.decoder(skip_special=skip_special)
    assert decode([SPACED, SPACED, THE]) == " the thethe"
    assert decode([THE, SPACED]) == "the the"
    # What begins a text has no space before it, as the tokenizer says.
    assert SP.decode([SPACED, SPACED]) == "the the"


def test_pieces_of_a_stream_are_the_text() -> None:
    detokenizer = IncrementalDetokenizer(SP.decoder(skip_special=True))
    eight = [PIECES.index(f"<0x{byte:02X}>") for byte in "ä".encode()]
    pieces = [detokenizer.push([token]) for token in (SPACED, *eight, SPACED)]
    assert "".join(pieces) + detokenizer.finish() == " theä the"


def test_each_token_has_a_text_of_its_own() -> None:
    assert (SP.text_of(SPACED), SP.text_of(THE)) == (" the", "the")
    assert SP.bytes_of(PIECES.index("<0xC3>")) == b"\xc3"
    tokens = [token for token in range(len(PIECES)) if not 3 <= token < 259]
    assert len({SP.text_of(token) for token in tokens}) == len(tokens)


def test_texts_of_other_tokenizers_are_as_before() -> None:
    document = json.loads(files()["tokenizer.json"])
    document["decoder"] = {"type": "Fuse"}
    plain = ModelTokenizer({"tokenizer.json": json.dumps(document).encode()})
    assert plain.decoder(skip_special=False)([SPACED]) == plain.decode([SPACED]) == "\u2581the"
