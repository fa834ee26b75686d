"""Bodies of requests.

A field that no body declares is refused by name, unless `unused_fields` lists it as harmless. So a
sample is never taken for what it is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic

from tinsmith.text.tool_forms import ToolRules
from tinsmith.text.tool_notations import FUNCTION_NAME
from tinsmith.v1 import trajectories_pb2
from tinsmith_gateway.json_lists import List
from tinsmith_gateway.openai.closed_schemas import close_objects
from tinsmith_gateway.openai.unused_fields import check_unused
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.text.penalties import Shaping
from tinsmith_runtime.text.stop_strings import MAX_STOP_STRINGS, check_stop_strings

_MAX_INT32 = 2**31 - 1
_MAX_TOP_LOGPROBS = 20
_MAX_PROMPTS = 256
_MAX_STOP_TOKENS = 1024
_SIGNS = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
"""What means something in a regular expression."""
MAX_MESSAGES = 8192
"""Messages of a conversation."""
MAX_TOOLS = 1024
"""Tools that a conversation offers."""

Token = Annotated[int, pydantic.Field(ge=0, le=_MAX_INT32)]
Limit = Annotated[int, pydantic.Field(ge=1, le=_MAX_INT32)]


class _Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream holds beyond the pieces; the last two are taken and change nothing."""

    include_usage: bool = False
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(_Body):
    """A schema that the answer keeps; it is kept whether or not `strict` asks for it."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = pydantic.Field(default={"type": "object"}, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_text(self) -> str | None:
        """The schema that the answer keeps."""
        if self.type == "json_schema" and self.json_schema is not None:
            return json.dumps(close_objects(self.json_schema.schema_))
        return '{"type":"object"}' if self.type == "json_object" else None


class StructuredOutputs(_Body):
    """A form of the answer, as vLLM spells it."""

    json_: dict[str, Any] | str | None = pydantic.Field(default=None, alias="json")
    regex: str | None = None
    choice: List[str] | None = pydantic.Field(default=None, min_length=1)
    json_object: bool | None = None


class SamplingBody(pydantic.BaseModel):
    """What both kinds of completion have in common.

    Extra fields: `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `min_tokens`,
    `stop_token_ids`, `skip_special_tokens`, `return_token_ids` (vLLM's spelling).
    """

    # Other fields are looked at by `check_offered`, which refuses all but harmless ones.
    model_config = pydantic.ConfigDict(extra="allow", allow_inf_nan=False)

    model: str = pydantic.Field(default="", max_length=512)
    n: int | None = pydantic.Field(default=None, ge=1, le=_MAX_INT32)
    seed: int | None = pydantic.Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | Annotated[List[str], pydantic.Field(max_length=MAX_STOP_STRINGS)] | None = None
    max_tokens: int | None = pydantic.Field(default=None, ge=0, le=_MAX_INT32)
    temperature: float | None = pydantic.Field(default=None, ge=0)
    top_p: float | None = pydantic.Field(default=None, gt=0, le=1)
    top_k: int | None = pydantic.Field(default=None, ge=-1, le=_MAX_INT32)
    min_p: float | None = pydantic.Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Token, float] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: List[str] | None = pydantic.Field(default=None, min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    min_tokens: int | None = pydantic.Field(default=None, ge=0, le=_MAX_INT32)
    stop_token_ids: List[Token] | None = pydantic.Field(default=None, max_length=_MAX_STOP_TOKENS)
    skip_special_tokens: bool = True
    return_token_ids: bool = False

    @property
    def num_samples(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def shaping(self) -> Shaping:
        """What is done to logits."""
        return Shaping(
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            logit_bias=self.logit_bias or {},
        )

    @property
    def output_format(self) -> trajectories_pb2.OutputFormat | None:
        """The form that the answer keeps."""
        return next(iter(self._forms()), None)

    def _forms(self) -> list[trajectories_pb2.OutputFormat]:
        form, outputs = self.response_format, self.structured_outputs or StructuredOutputs()
        schemas = [
            None if form is None else form.schema_text,
            _text_of(self.guided_json),
            _text_of(outputs.json_),
            '{"type":"object"}' if outputs.json_object else None,
        ]
        regexes = [
            self.guided_regex,
            outputs.regex,
            _one_of(self.guided_choice),
            _one_of(outputs.choice),
        ]
        return [
            *(trajectories_pb2.OutputFormat(json_schema=one) for one in schemas if one is not None),
            *(trajectories_pb2.OutputFormat(regex=one) for one in regexes if one is not None),
        ]

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_offered(self) -> None:
        """Refuse parameters that are unknown, or change samples and are not offered.

        Raises:
            InvalidFieldError: Naming the first.
        """
        check_unused(self.model_extra)
        self.shaping.check("")
        if len(self._forms()) > 1:
            raise InvalidFieldError("response_format", "is one of several forms; give one")
        check_stop_strings(self.stops, "stop")
        if self.min_tokens and self._forms():
            raise InvalidFieldError(
                "min_tokens", "excludes a form of the answer, which ends where it is whole"
            )


def _one_of(choices: Sequence[str] | None) -> str | None:
    """Return the regular expression of one of some texts."""
    if choices is None:
        return None
    return "(?:" + "|".join(_SIGNS.sub(r"\\\g<0>", choice) for choice in choices) + ")"


def _text_of(schema: dict[str, Any] | str | None) -> str | None:
    if isinstance(schema, str):
        try:
            parsed = json.loads(schema)
        except (ValueError, RecursionError):
            # The sampler says what is wrong with it.
            return schema
        return json.dumps(close_objects(parsed)) if isinstance(parsed, dict) else schema
    return None if schema is None else json.dumps(close_objects(schema))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


class Message(pydantic.BaseModel):
    """One message; further fields are for the chat template."""

    model_config = pydantic.ConfigDict(extra="allow")

    role: str
    content: str | List[dict[str, Any]] | None = None

    @property
    def num_of_pictures(self) -> int:
        """Characters of its pictures."""
        parts = self.content if isinstance(self.content, list) else ()
        images = [part.get("image_url") for part in parts if part.get("type") == "image_url"]
        urls = [each.get("url") if isinstance(each, dict) else each for each in images]
        return sum(len(url) for url in urls if isinstance(url, str))

    def to_mapping(self) -> dict[str, Any]:
        """Return the message as it was sent."""
        return self.model_dump(exclude_unset=True)


class FunctionSchema(pydantic.BaseModel):
    """A function that the model may call; further fields are for the chat template."""

    model_config = pydantic.ConfigDict(extra="allow")

    # A declared field would leave its place among the others, which the template shows.
    name: str = pydantic.Field(pattern=FUNCTION_NAME)

    @property
    def parameters(self) -> dict[str, Any] | None:
        """The schema of its arguments."""
        return (self.model_extra or {}).get("parameters")

    @property
    def strict(self) -> bool:
        """Whether its arguments have to keep the schema."""
        return bool((self.model_extra or {}).get("strict"))

    @pydantic.model_validator(mode="after")
    def _check(self) -> FunctionSchema:
        if not isinstance(self.parameters, dict | None):
            raise ValueError("parameters must be a JSON schema")
        return self


class Tool(pydantic.BaseModel):
    """A tool; further fields are for the chat template."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionSchema

    def to_mapping(self) -> dict[str, Any]:
        """Return the tool as it was sent."""
        return self.model_dump(exclude_unset=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ToolChoice:
    must_call: bool = False
    names: tuple[str, ...] | None = None
    """Tools that may be called; None for all."""
    is_single: bool = False


def _allowed(mode: str, tools: Sequence[Any]) -> _ToolChoice | None:
    names = []
    for tool in tools:
        match tool:
            case {"type": "function", "function": {"name": str(name)}}:
                names.append(name)
            case _:
                return None
    return _ToolChoice(must_call=mode == "required", names=tuple(names))


class ChatBody(SamplingBody):
    """Body of `POST /v1/chat/completions`.

    Extra fields: `chat_template_kwargs`, `add_generation_prompt`, `continue_final_message`.
    """

    messages: List[Message] = pydantic.Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(default=None, ge=0, le=_MAX_TOP_LOGPROBS)
    tools: List[Tool] | None = pydantic.Field(default=None, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @property
    def tool_rules(self) -> ToolRules | None:
        """What calls keep; None without tools."""
        choice = self._choice
        if not self.shown_tools or choice is None:
            return None
        tools = [tool.function for tool in self.tools or ()]
        schemas = {
            tool.name: close_objects(tool.parameters or {"type": "object", "properties": {}})
            if choice.must_call or tool.strict
            else None
            for tool in tools
            if choice.names is None or tool.name in choice.names
        }
        return ToolRules(
            schemas=schemas,
            must_call=choice.must_call,
            is_parallel=self.parallel_tool_calls is not False and not choice.is_single,
        )

    @property
    def _choice(self) -> _ToolChoice | None:
        """The choice of a tool; None if it has no form that is known."""
        match self.tool_choice:
            case None | "none" | "auto":
                return _ToolChoice()
            case "required":
                return _ToolChoice(must_call=True)
            case {"type": "function", "function": {"name": str(name)}}:
                return _ToolChoice(must_call=True, names=(name,), is_single=True)
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
            }:
                return _allowed(mode, tools)
        return None

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of; none for `tool_choice` `none`."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.to_mapping() for tool in self.tools]

    def check_offered(self) -> None:
        """Refuse what is not offered, or cannot be held to."""
        super().check_offered()
        self._check_tools()
        form = self.response_format
        if form is not None and form.type == "json_schema" and form.json_schema is None:
            raise InvalidFieldError("response_format.json_schema", "is missing")
        if self.top_logprobs and not self.logprobs:
            raise InvalidFieldError("top_logprobs", "needs logprobs")
        if self.max_tokens == 0:
            raise InvalidFieldError("max_tokens", "must be at least 1")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidFieldError("max_tokens", "differs from max_completion_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidFieldError(
                "continue_final_message", "excludes add_generation_prompt: the turn is begun"
            )

    def _check_tools(self) -> None:
        choice = self._choice
        if choice is None:
            raise InvalidFieldError(
                "tool_choice",
                "must be 'none', 'auto', 'required', or an object with the type 'function' or "
                "'allowed_tools'",
            )
        if not self.tools:
            if choice.must_call:
                raise InvalidFieldError("tool_choice", "needs tools to choose from")
            return
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) != len(names):
            raise InvalidFieldError("tools", "have two functions of one name")
        missing = sorted(set(choice.names or ()) - set(names))
        if missing:
            raise InvalidFieldError("tool_choice", f"names {missing[0]!r}, which is not in tools")


class CompletionBody(SamplingBody):
    """Body of `POST /v1/completions`. Extra field: `add_special_tokens`."""

    prompt: (
        str
        | Annotated[List[Token], pydantic.Field(min_length=1)]
        | Annotated[List[str], pydantic.Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[
            List[Annotated[List[Token], pydantic.Field(min_length=1)]],
            pydantic.Field(min_length=1, max_length=_MAX_PROMPTS),
        ]
    )
    logprobs: int | None = pydantic.Field(default=None, ge=0, le=_MAX_TOP_LOGPROBS)
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def num_text(self) -> int:
        """Characters of the prompts that are text."""
        return sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))

    def check_offered(self) -> None:
        """Refuse what is not offered."""
        super().check_offered()
        if self.best_of not in (None, self.num_samples):
            raise InvalidFieldError("best_of", "is not offered; leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidFieldError("max_tokens", "must be at least 1 unless the prompt is echoed")
        if self.stream and self.echo:
            raise InvalidFieldError("echo", "is not offered in a stream")
