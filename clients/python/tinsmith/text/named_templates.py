"""Chat templates by name, or from a file: for base models that have none, or another one.

A template is part of what a run is created with; its samples, checkpoints and exports have it too.
"""

from __future__ import annotations

from pathlib import Path

from tinsmith.errors import ConfigurationError, InvalidArgumentError
from tinsmith.text.chat_template import check_syntax
from tinsmith.text.tokenizer import Tokenizer

ROLE_COLON = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- set role = 'system' if message.role == 'developer' else message.role -%}"
    "{{- (role | capitalize) ~ ': ' ~ (message.content | trim) -}}"
    "{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{{- '\\n\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)
"""`User: ...`, an empty line, `Assistant: ...`; the end of a text ends an answer."""

NAMED_TEMPLATES = {"role_colon": ROLE_COLON}
_SUFFIX = ".jinja"
_ASKED, _SAID = "TinsmithAsked", "TinsmithSaid"


def read_chat_template(given: str) -> str:
    """Return the source of a template: that of a name, or of a file that ends with `.jinja`.

    Raises:
        ConfigurationError: If there is no such name, or the file cannot be read or is none.
    """
    if given in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[given]
    if not given.endswith(_SUFFIX):
        raise ConfigurationError(
            f"there is no chat template {given!r}",
            remedy=f"use {', '.join(NAMED_TEMPLATES)}, or a file that ends with {_SUFFIX}",
        )
    try:
        source = Path(given).expanduser().read_text(encoding="utf-8")
        check_syntax(source)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"chat_template: {given} cannot be read: {error}", remedy="check the path"
        ) from error
    except InvalidArgumentError as error:
        raise ConfigurationError(f"{given}: {error.message}", remedy=error.remedy) from error
    return source


def tokenizer_with(tokenizer: Tokenizer, given: str) -> Tokenizer:
    """Return a tokenizer that renders by a template of a name or a file.

    Raises:
        ConfigurationError: If there is no such template, or conversations cannot be trained by it:
            it must show what was asked and said, and append the answer to the prompt.
    """
    changed = tokenizer.with_chat_template(read_chat_template(given))
    asked = {"role": "user", "content": _ASKED}
    try:
        prompt = changed.render_chat_template([asked], add_generation_prompt=True)
        whole = changed.render_chat_template([asked, {"role": "assistant", "content": _SAID}])
    except InvalidArgumentError as error:
        raise ConfigurationError(
            f"chat_template: {given}: {error.message}", remedy="correct the template"
        ) from error
    _, _, ending = whole.rpartition(_SAID)
    ends = any(end in ending for end in changed.turn_ends)
    if not whole.startswith(prompt) or not ends:
        raise ConfigurationError(
            f"chat_template: {given} does not end an answer behind its prompt with a special token",
            remedy="write {{ eos_token }} behind an answer, and the prompt alike with and without",
        )
    return changed
