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

from tinsmith.errors import FailedPreconditionError, InvalidArgumentError
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
_DEFAULT, _TOOL_USE = "default", "tool_use"
_TEMPLATE_FILES = {_DEFAULT: "chat_template.jinja", _TOOL_USE: "tool_use.jinja"}
_ANCHOR = "a"
_PLACEHOLDER = "TinsmithTurnPlaceholder"
_IMAGE_TOKENS = ("<|image_pad|>", "<|image|>", "<image_soft_token>", "<image>", "[IMG]")
"""What templates write for an image, where the files do not say it."""


class Tokenizer:
    """Text to token ids and back, and conversations to prompts.

    Args:
        files: `tokenizer.json`, `tokenizer_config.json` and optionally `chat_template.jinja` and
            `tool_use.jinja`, the template of conversations with tools.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        # What a trainer's call left behind: it would cut or fill every text in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
        self._template_files = {
            name: files[path] for name, path in _TEMPLATE_FILES.items() if path in files
        }

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

    @cached_property
    def turn_ends(self) -> tuple[str, ...]:
        """Special tokens that end an answer: of a text, and of a turn of the chat template."""
        ends = dict.fromkeys(filter(None, [self.special_tokens.get("eos_token")]))
        if self._template_sources and (end := self._turn_end()) is not None:
            ends[end] = None
        return tuple(ends)

    def _turn_end(self) -> str | None:
        """Return the first special token behind an answer; None if the template writes none."""
        turn = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _PLACEHOLDER},
        ]
        try:
            _, _, ending = self.render_chat_template(turn).rpartition(_PLACEHOLDER)
        except InvalidArgumentError:
            return None
        for token in self.encode(ending, add_special_tokens=False):
            if not self.decode([token], skip_special_tokens=True):
                return self.decode([token])
        return None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if it is unknown."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        # A batch of one: the call for one text keeps every other thread of the process waiting.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ids = [int(token) for token in tokens]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def decode_behind(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens that follow others, such as a sample behind its prompt.

        SentencePiece's space is part of the word behind it, and is left out where a text begins.
        """
        if not self._anchor:
            return self.decode(tokens)
        return self.decode([*self._anchor, *tokens]).removeprefix(_ANCHOR)

    @cached_property
    def _anchor(self) -> list[int]:
        """Tokens of a letter to decode others behind, if a text loses its first space."""
        decoder = json.loads(self._tokenizer.to_str()).get("decoder")
        anchor = self.encode(_ANCHOR, add_special_tokens=False)
        return anchor if _strips_start(decoder) and self.decode(anchor) == _ANCHOR else []

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; None if the model has none."""
        return self._template_sources.get(_DEFAULT)

    @property
    def tool_template(self) -> str | None:
        """The source of the template of conversations with tools; None if the model has none."""
        return self._template_sources.get(_TOOL_USE, self.chat_template)

    @cached_property
    def _template_sources(self) -> dict[str, str]:
        """Templates by name: of the settings, or of files of their own, which go before."""
        given = self._config.get("chat_template")
        if isinstance(given, str):
            given = {_DEFAULT: given}
        elif isinstance(given, list):
            given = {entry["name"]: entry["template"] for entry in given}
        sources = {
            name: source
            for name, source in (given if isinstance(given, dict) else {}).items()
            if isinstance(source, str)
        }
        for name, content in self._template_files.items():
            sources[name] = content.decode()
        if sources and _DEFAULT not in sources:
            sources[_DEFAULT] = next(iter(sources.values()))
        return sources

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        reads_images = self.image_token_id is not None
        return {
            name: ChatTemplate(source, variables=self.special_tokens, reads_images=reads_images)
            for name, source in self._template_sources.items()
            if name in (_DEFAULT, _TOOL_USE)
        }

    def with_chat_template(self, source: str) -> Tokenizer:
        """Return a tokenizer of the same tokens that renders every conversation by a template."""
        return Tokenizer(files_with_template(self._files, source))

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
            InvalidArgumentError: If the template refuses the conversation, or a text of it leaves
                no trace; names the message.
        """
        if not self._templates:
            raise FailedPreconditionError(
                "the base model has no chat template", remedy="build the prompt with encode()"
            )
        template = self._templates[_DEFAULT]
        if tools:
            template = self._templates.get(_TOOL_USE, template)
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
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


def files_with_template(files: Mapping[str, bytes], source: str) -> dict[str, bytes]:
    """Return the files of a tokenizer with a chat template, and no other one."""
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    config.pop("chat_template", None)
    return {
        "tokenizer.json": files["tokenizer.json"],
        "tokenizer_config.json": json.dumps(config).encode(),
        _TEMPLATE_FILES[_DEFAULT]: source.encode(),
    }


def _strips_start(decoder: Any) -> bool:
    """Whether a decoder leaves out a space with which a text begins."""
    if not isinstance(decoder, dict):
        return False
    kind = decoder.get("type")
    if kind == "Strip":
        return bool(decoder.get("start"))
    if kind == "Metaspace":
        return decoder.get("prepend_scheme") != "never"
    return any(_strips_start(part) for part in decoder.get("decoders", ()))


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
