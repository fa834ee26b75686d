"""Tokenizers: files from the server, kept on disk, rendered as transformers renders them."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tinsmith.errors import FailedPreconditionError
from tinsmith.settings import cache_dir
from tinsmith.text.chat_template import ChatTemplate

_DIGEST = re.compile(r"[0-9a-f]{16,128}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_IMAGE_TOKENS = ("<|image_pad|>", "<|image|>", "<image_soft_token>", "<image>", "[IMG]")
"""What templates write for an image, where the files do not say it."""


class Tokenizer:
    """Text to token ids and back, and conversations to prompts.

    Args:
        files: `tokenizer.json`, `tokenizer_config.json` and optionally `chat_template.jinja`.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        self._config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
        self._template_file = files.get("chat_template.jinja")

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text; None if there is none."""
        return self.token_to_id(self.special_tokens.get("eos_token", ""))

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text; None if there is none."""
        return self.token_to_id(self.special_tokens.get("bos_token", ""))

    @cached_property
    def image_token_id(self) -> int | None:
        """Id of the token that the chat template writes for an image; None if it writes none."""
        declared = self._config.get("image_token")
        if isinstance(declared, dict):
            declared = declared.get("content")
        names = (declared,) if isinstance(declared, str) else _IMAGE_TOKENS
        template = self.chat_template or ""
        for name in names:
            if name in template and (token := self.token_to_id(name)) is not None:
                return token
        return None

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by role, such as `eos_token`."""
        found = {}
        for role in _SPECIAL_TOKENS:
            value = self._config.get(role)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[role] = value
        return found

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if it is unknown."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ids = [int(token) for token in tokens]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    @cached_property
    def chat_template(self) -> str | None:
        """The source of the chat template; None if the model has none."""
        if self._template_file is not None:
            return self._template_file.decode()
        source = self._config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}
        if isinstance(source, dict):
            source = source.get("default") or next(iter(source.values()), None)
        return source if isinstance(source, str) else None

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        return None if self.chat_template is None else ChatTemplate(self.chat_template)

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return a conversation as text, by the model's own template.

        Args:
            messages: Mappings with `role` and `content`.
            add_generation_prompt: Whether to begin the assistant's turn.
            tools: JSON schemas of the tools that the model may call.
            **variables: Further variables of the template, such as `enable_thinking`.

        Raises:
            FailedPreconditionError: If the model has no chat template.
        """
        if self._chat_template is None:
            raise FailedPreconditionError(
                "the base model has no chat template", remedy="build the prompt with encode()"
            )
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**self.special_tokens, **variables},
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return a conversation as token ids; the arguments are those of `render_chat_template`."""
        text = self.render_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )
        return self.encode(text, add_special_tokens=False)


class TokenizerCache:
    """Tokenizer files on disk, by digest; remembers which digest a model had last."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or cache_dir() / "tokenizers"

    def known_digest(self, key: str) -> str:
        """Return the digest that a model had last, if its files are here; else nothing."""
        try:
            digest = self._pointer(key).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""
        return digest if self.load(digest) else ""

    def load(self, digest: str) -> dict[str, bytes]:
        """Return the files of a digest; nothing if they are not here."""
        if not _DIGEST.fullmatch(digest):
            return {}
        try:
            return {path.name: path.read_bytes() for path in (self._root / digest).iterdir()}
        except OSError:
            return {}

    def store(self, key: str, digest: str, files: Mapping[str, bytes]) -> None:
        """Keep the files of a model. A disk that cannot be written is no error."""
        if not _DIGEST.fullmatch(digest) or not all(map(_FILE_NAME.fullmatch, files)):
            return
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            if not (self._root / digest).exists():
                with tempfile.TemporaryDirectory(dir=self._root) as scratch:
                    for name, content in files.items():
                        (Path(scratch) / "files").mkdir(exist_ok=True)
                        (Path(scratch) / "files" / name).write_bytes(content)
                    os.rename(Path(scratch) / "files", self._root / digest)
            stamp = datetime.datetime.now(tz=datetime.UTC).strftime("%s%f")
            scratch_pointer = self._root / f"pointer-{os.getpid()}-{stamp}"
            scratch_pointer.write_text(digest, encoding="ascii")
            os.replace(scratch_pointer, self._pointer(key))
        except OSError:
            return

    def _pointer(self, key: str) -> Path:
        return self._root / f"model-{hashlib.sha256(key.encode()).hexdigest()}"
