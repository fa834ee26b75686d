"""Chat templates, rendered in a sandbox with the rules of transformers.

Templates come from model repositories and are untrusted code. The environment, its filters and the
data a template can see follow `transformers.utils.chat_template_utils`; the tests compare with it.
Messages are given in the forms that the template shows, and a text that it does not show is refused
(`template_forms`, `wholeness`).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np

from tinsmith.errors import InvalidArgumentError
from tinsmith.text.template_forms import TemplateForms
from tinsmith.text.wholeness import REASONING_FIELDS, find_lost

_REMEDY = "change the messages to what the model's template allows"


class ChatTemplate:
    """A compiled template.

    Args:
        source: Of the template.
        variables: That every rendering has, such as the special tokens.
        reads_images: Whether the model reads images.
    """

    def __init__(
        self, source: str, *, variables: Mapping[str, Any], reads_images: bool = False
    ) -> None:
        try:
            self._template = _make_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise _unreadable(error) from error
        self._variables = _plain(dict(variables))
        self._forms = TemplateForms(self._render_as_it_is, reads_images=reads_images)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Return a conversation as text.

        Raises:
            InvalidArgumentError: If the template refuses the conversation, or passes over a text.
        """
        further = {"add_generation_prompt": add_generation_prompt, **_plain(dict(variables))}
        given_tools = None if tools is None else _plain(list(tools))

        def render(
            messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
        ) -> str:
            return self._render_as_it_is(messages, tools, **further)

        shaped = self._forms.shape(_plain(list(messages)))
        try:
            rendered = render(shaped, given_tools)
        except jinja2.TemplateError as error:
            raise InvalidArgumentError(
                f"the chat template refused the conversation: {error}",
                remedy=_REMEDY,
            ) from error
        except Exception as error:
            # A template is a stranger's program: on a message that it did not foresee it may fail
            # in any way, most often by joining what is no text to a text.
            raise InvalidArgumentError(
                f"the chat template failed on the conversation with {error!r}", remedy=_REMEDY
            ) from error
        lost = find_lost(rendered, shaped, given_tools, render)
        if lost is not None:
            raise InvalidArgumentError(
                f"{lost} leaves no trace in the prompt: the model's chat template passes it over",
                remedy="leave it out, or write it in a message that the template shows",
            )
        return rendered

    def _render_as_it_is(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        **variables: Any,
    ) -> str:
        given = {**self._variables, "add_generation_prompt": False, **variables}
        return self._template.render(
            messages=_alias_reasoning(messages), tools=tools, documents=None, **given
        )


def check_syntax(source: str) -> None:
    """Refuse a source that is no template; nothing of it is executed.

    Raises:
        InvalidArgumentError: If it cannot be read.
    """
    try:
        _make_environment().parse(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise _unreadable(error) from error


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _unreadable(error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the chat template of the model cannot be read: {error}",
        remedy="correct the template, or build prompts with encode()",
    )


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}` blocks, which mark assistant text and render as it is."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a plain set.

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the block's content under a call that changes nothing."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models never saw.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:  # noqa: A002  the name that templates use
    return datetime.datetime.now().strftime(format)  # noqa: DTZ005  local time, as transformers


def _alias_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give a message's reasoning under each name that templates read."""
    aliased = []
    for message in messages:
        given = (message[name] for name in REASONING_FIELDS if message.get(name) is not None)
        reasoning = next(given, None)
        if reasoning is None:
            aliased.append(dict(message))
        else:
            aliased.append({"thinking": reasoning, **message, "reasoning_content": reasoning})
    return aliased


def _plain(value: Any) -> Any:
    """Return a copy made of JSON types, since methods of rich objects could leave the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    return f"<{type(value).__name__}>"
