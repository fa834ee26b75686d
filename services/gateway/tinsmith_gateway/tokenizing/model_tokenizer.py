"""A tokenizer, and what its files say beyond it: special tokens, bytes of tokens, images."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from tinsmith.text.tokenizer import Tokenizer

ResultT = TypeVar("ResultT")

_SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class ChatTokenizer(Protocol):
    """What the protocols of the gateway need of a model's tokenizer."""

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; None if the model has none."""

    @property
    def tool_template(self) -> str | None:
        """The source of the template of conversations with tools; None if the model has none."""

    @property
    def image_token(self) -> int | None:
        """The placeholder of an image; None if the model reads none."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special ones included."""

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        **variables: Any,
    ) -> str:
        """Return a conversation as text, by the model's own template."""

    def decoder(self, *, skip_special: bool, kept: Collection[str] = ()) -> Callable[..., str]:
        """Return what turns token ids into text.

        Args:
            skip_special: Whether special tokens are left out.
            kept: Those that are not.
        """

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes that a token stands for, which may be a part of a character.

        None if the tokenizer does not write text byte by byte and they cannot be known.
        """

    def text_of(self, token: int) -> str:
        r"""Return a token as text; bytes that are no text are shown as `bytes:\x..`."""

    async def aside(self, work: Callable[..., ResultT], *args: Any) -> ResultT:
        """Return what work with this tokenizer returns that takes milliseconds or more."""

    async def quickly(self, work: Callable[..., ResultT], *args: Any) -> ResultT:
        """Return what work with this tokenizer returns that takes microseconds here."""


class ModelTokenizer(Tokenizer):
    """A tokenizer, and what its files say beyond it; implements `ChatTokenizer` in this process.

    Args:
        files: As `GetTokenizer` delivers them.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files)
        document = json.loads(files["tokenizer.json"])
        self._special = {
            int(token["id"]): str(token["content"])
            for token in document.get("added_tokens", ())
            if token.get("special")
        }
        self._added = {
            int(token["id"]): str(token["content"]) for token in document.get("added_tokens", ())
        }
        decoder = document.get("decoder")
        self._is_byte_level = _has_part(decoder, lambda part: part.get("type") == "ByteLevel")
        self._marks_spaces = _has_part(decoder, _marks_spaces)
        vocabulary = document.get("model", {}).get("vocab")
        if isinstance(vocabulary, dict):
            self._pieces = {int(token): str(piece) for piece, token in vocabulary.items()}
        else:
            # Of a unigram model each piece stands beside its score.
            self._pieces = {token: str(piece) for token, (piece, _) in enumerate(vocabulary or ())}
        self.image_token = self.image_token_id

    async def aside(self, work: Callable[..., ResultT], *args: Any) -> ResultT:
        """See `ChatTokenizer`: in a thread."""
        return await asyncio.to_thread(work, *args)

    async def quickly(self, work: Callable[..., ResultT], *args: Any) -> ResultT:
        """See `ChatTokenizer`: at once."""
        return work(*args)

    def decoder(self, *, skip_special: bool, kept: Collection[str] = ()) -> Callable[..., str]:
        """See `ChatTokenizer`."""
        if not skip_special:
            return self.decode_behind
        left_out = {token for token, content in self._special.items() if content not in kept}

        def decode(tokens: Sequence[int]) -> str:
            kept_tokens = [token for token in tokens if token not in left_out]
            return self.decode_behind(kept_tokens)

        return decode

    def bytes_of(self, token: int) -> bytes | None:
        """See `ChatTokenizer`."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._pieces.get(token)
        if self._is_byte_level and piece is not None:
            table = _byte_of_letter()
            if all(letter in table for letter in piece):
                return bytes(table[letter] for letter in piece)
        if self._marks_spaces and piece is not None:
            byte = _BYTE_PIECE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
        text = self.decode([token])
        return None if "\ufffd" in text else text.encode()

    def text_of(self, token: int) -> str:
        """See `ChatTokenizer`."""
        content = self.bytes_of(token)
        if content is None:
            return self.decode([token])
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _has_part(decoder: object, is_wanted: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Whether a decoder is such a one, or has such a part."""
    if not isinstance(decoder, dict):
        return False
    return is_wanted(decoder) or any(
        _has_part(part, is_wanted) for part in decoder.get("decoders", ())
    )


def _marks_spaces(part: Mapping[str, Any]) -> bool:
    """Whether a part of a decoder makes spaces of SentencePiece's mark."""
    if part.get("type") == "Metaspace":
        return part.get("replacement") == _SPACE
    return part.get("type") == "Replace" and part.get("pattern") == {"String": _SPACE}


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Return the byte behind each letter of a byte-level vocabulary.

    Source: `bytes_to_unicode` of GPT-2: printable Latin-1 stands for itself, the rest follows.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
