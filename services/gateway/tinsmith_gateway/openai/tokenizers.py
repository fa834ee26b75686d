"""Tokenizers of base models, as the scheduler delivers them.

Files are kept by digest, so that models of one family share them. Whether a model still has the
files that it had is asked again after a while: a base model may be replaced by another of its name.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

from tinsmith.text.tokenizer import Tokenizer
from tinsmith.v1 import scheduler_pb2
from tinsmith_gateway.access.authentication import Credential
from tinsmith_gateway.openai.text.tool_calls import ToolFormat, detect_format
from tinsmith_gateway.upstream.pod_client import Upstream
from tinsmith_gateway.upstream.routing import SCHEDULER_SERVICE
from tinsmith_runtime.errors import FailedPreconditionError
from tinsmith_runtime.tokenizer_files import digest_of

_FRESH_S = 60.0
_MAX_KEYS = 10_000
_Key = tuple[str, str, str]
"""Project, pool and base model: another pool may serve another model of the same name."""
_IMAGE_TOKENS = ("<|image_pad|>", "<|image|>", "<image_soft_token>", "<image>", "[IMG]")
"""What templates write for an image, where the files do not say it."""


class ModelTokenizer:
    """A tokenizer, and what its files say beyond it.

    Args:
        files: As `GetTokenizer` delivers them.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.tokenizer = Tokenizer(files)
        document = json.loads(files["tokenizer.json"])
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        self._special = {
            int(token["id"]): str(token["content"])
            for token in document.get("added_tokens", ())
            if token.get("special")
        }
        self._added = {
            int(token["id"]): str(token["content"]) for token in document.get("added_tokens", ())
        }
        self._is_byte_level = _has_byte_level(document.get("decoder"))
        vocabulary = document.get("model", {}).get("vocab")
        self._pieces = (
            {int(token): piece for piece, token in vocabulary.items()}
            if isinstance(vocabulary, dict)
            else {}
        )
        self.tool_format: ToolFormat | None = detect_format(self.tokenizer.chat_template or "")
        self.image_token = self._find_image_token(config.get("image_token"))

    def decoder(self, *, skip_special: bool, kept: Collection[str] = ()) -> Callable[..., str]:
        """Return what turns token ids into text.

        Args:
            skip_special: Whether special tokens are left out.
            kept: Those that are not.
        """
        if not skip_special:
            return self.tokenizer.decode
        left_out = {token for token, content in self._special.items() if content not in kept}

        def decode(tokens: Sequence[int]) -> str:
            return self.tokenizer.decode([token for token in tokens if token not in left_out])

        return decode

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes that a token stands for, which may be a part of a character.

        None if the tokenizer does not write text byte by byte and they cannot be known.
        """
        if token in self._added:
            return self._added[token].encode()
        piece = self._pieces.get(token)
        if self._is_byte_level and piece is not None:
            table = _byte_of_letter()
            if all(letter in table for letter in piece):
                return bytes(table[letter] for letter in piece)
        text = self.tokenizer.decode([token])
        return None if "\ufffd" in text else text.encode()

    def text_of(self, token: int) -> str:
        r"""Return a token as text; bytes that are no text are shown as `bytes:\x..`."""
        content = self.bytes_of(token)
        if content is None:
            return self.tokenizer.decode([token])
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _find_image_token(self, declared: object) -> int | None:
        if isinstance(declared, dict):
            declared = declared.get("content")
        names = (declared,) if isinstance(declared, str) else _IMAGE_TOKENS
        template = self.tokenizer.chat_template or ""
        for name in names:
            if name in template and (token := self.tokenizer.token_to_id(name)) is not None:
                return token
        return None


class TokenizerStore:
    """Tokenizers by base model.

    Args:
        upstream: Calls the scheduler.
        clock: Monotonic seconds.
    """

    def __init__(self, upstream: Upstream, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._upstream = upstream
        self._clock = clock
        self._digests: OrderedDict[_Key, tuple[str, float]] = OrderedDict()
        self._tokenizers: dict[str, ModelTokenizer] = {}
        self._locks: dict[_Key, asyncio.Lock] = {}

    async def get(self, base_model: str, credential: Credential) -> ModelTokenizer:
        """Return the tokenizer of a base model.

        Raises:
            ModelNotFoundError: If no pod serves it.
            FailedPreconditionError: If it has none.
        """
        key = (credential.caller.project, credential.caller.pool, base_model)
        digest, expires_s = self._digests.get(key, ("", 0.0))
        if expires_s > self._clock():
            return self._tokenizers[digest]
        async with self._locks.setdefault(key, asyncio.Lock()):
            digest, expires_s = self._digests.get(key, ("", 0.0))
            if expires_s > self._clock():
                return self._tokenizers[digest]
            return await self._fetch(key, digest, credential)

    async def _fetch(self, key: _Key, known: str, credential: Credential) -> ModelTokenizer:
        project, pool, base_model = key
        found = await self._upstream.call(
            SCHEDULER_SERVICE,
            "GetTokenizer",
            scheduler_pb2.GetTokenizerRequest(
                base_model=base_model, known_digest=known, project=project, pool=pool
            ),
            scheduler_pb2.Tokenizer,
            credential,
        )
        tokenizer = self._tokenizers.get(found.digest)
        if tokenizer is None:
            if "tokenizer.json" not in found.files:
                raise FailedPreconditionError(
                    f"the base model {base_model} has no tokenizer; use the native API",
                    base_model=base_model,
                )
            files = dict(found.files)
            if await asyncio.to_thread(digest_of, files) != found.digest:
                # Others share what has this digest, so that it must be what it says.
                raise FailedPreconditionError(
                    f"the tokenizer of {base_model} is not the one that its worker registered",
                    base_model=base_model,
                )
            tokenizer = await asyncio.to_thread(ModelTokenizer, files)
            self._tokenizers[found.digest] = tokenizer
        self._digests[key] = (found.digest, self._clock() + _FRESH_S)
        while len(self._digests) > _MAX_KEYS:
            oldest, _ = self._digests.popitem(last=False)
            self._locks.pop(oldest, None)
        used = {digest for digest, _ in self._digests.values()}
        for digest in set(self._tokenizers) - used:
            del self._tokenizers[digest]
        return tokenizer


def _has_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "ByteLevel":
        return True
    return any(_has_byte_level(part) for part in decoder.get("decoders", ()))


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Return the byte behind each letter of a byte-level vocabulary.

    Source: `bytes_to_unicode` of GPT-2: printable Latin-1 stands for itself, the rest follows.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
