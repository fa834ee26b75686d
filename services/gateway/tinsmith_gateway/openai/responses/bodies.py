"""Bodies of `POST /v1/responses`, as those of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pydantic

from tinsmith_gateway.json_lists import List
from tinsmith_gateway.openai.bodies import MAX_MESSAGES, MAX_TOOLS, ChatBody, Limit
from tinsmith_gateway.openai.responses.conversation import messages_of
from tinsmith_gateway.openai.translation import SAME_FIELDS, chat_of, check_offered
from tinsmith_runtime.errors import InvalidFieldError

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = frozenset({_LOGPROBS, "reasoning.encrypted_content"})
"""What may be included; a model here has no reasoning of its own that could be encrypted."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "reasoning": (None, {}, {"effort": None}, {"effort": None, "summary": None}),
    "truncation": (None, "disabled"),
}
"""Each with the values that ask for nothing."""
_REASONS = {
    "background": "is not offered: nothing is kept on the server",
    "conversation": "is not offered: nothing is kept on the server; send the whole input",
    "previous_response_id": "is not offered: nothing is kept on the server; send the whole input",
}
_PASSED = SAME_FIELDS | {"stop", "top_k"}
"""Fields beyond OpenAI's that mean the same in a chat completion."""


class TextFormat(pydantic.BaseModel):
    """The form of the text."""

    model_config = pydantic.ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = pydantic.Field(default=None, alias="schema")
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        """Return it as `response_format` of a chat completion.

        Raises:
            InvalidFieldError: If a schema is missing.
        """
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema_ is None:
            raise InvalidFieldError("text.format.schema", "is missing")
        schema = {"name": self.name or "", "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(pydantic.BaseModel):
    """What is said of the text."""

    model_config = pydantic.ConfigDict(extra="forbid")

    format: TextFormat | None = None
    verbosity: None = None


class FunctionTool(pydantic.BaseModel):
    """A function; tools that a server runs by itself are not offered."""

    model_config = pydantic.ConfigDict(extra="forbid")

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        """Return it as a tool of a chat completion."""
        fields = self.model_dump(exclude_none=True, exclude={"type"})
        return {"type": "function", "function": fields}


class EventOptions(pydantic.BaseModel):
    """Taken, and changes nothing."""

    model_config = pydantic.ConfigDict(extra="forbid")

    include_obfuscation: bool | None = None


class ResponsesBody(pydantic.BaseModel):
    """Body of `POST /v1/responses`."""

    # Other fields are looked at by `to_chat`, which refuses all but harmless ones.
    model_config = pydantic.ConfigDict(extra="allow", allow_inf_nan=False)

    model: str = pydantic.Field(default="", max_length=512)
    input: str | List[dict[str, Any]] = pydantic.Field(max_length=2**26)
    instructions: str | None = None
    tools: List[FunctionTool] | None = pydantic.Field(default=None, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: Limit | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: List[str] | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None

    def to_chat(self) -> ChatBody:
        """Return the body of the chat completion that draws the same samples.

        Raises:
            InvalidFieldError: Naming the first field that is unknown or not offered.
        """
        extra = self.model_extra or {}
        check_offered(extra, reasons=_REASONS, neutral=_NEUTRAL, passed=_PASSED)
        wrong = sorted(set(self.include or ()) - _INCLUDED)
        if wrong:
            raise InvalidFieldError("include", f"holds {wrong[0]!r}, which is not offered")
        messages = messages_of(self.input, self.instructions)
        if not 0 < len(messages) <= MAX_MESSAGES:
            raise InvalidFieldError("input", f"must have 1 to {MAX_MESSAGES} messages")
        has_logprobs = bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
        form = self.text.format if self.text is not None else None
        fields = {
            "model": self.model,
            "messages": messages,
            "tools": [tool.to_chat() for tool in self.tools or ()] or None,
            "tool_choice": self._chat_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": None if form is None else form.to_chat(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": has_logprobs,
            "top_logprobs": self.top_logprobs,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
            **{name: extra[name] for name in _PASSED & set(extra)},
        }
        return chat_of(fields)

    def _chat_choice(self) -> str | dict[str, Any] | None:
        match self.tool_choice:
            case {"type": "function", "name": str(name)}:
                return {"type": "function", "function": {"name": name}}
            case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
                named = [
                    {"type": "function", "function": {"name": tool.get("name")}}
                    if isinstance(tool, dict) and tool.get("type") == "function"
                    else tool
                    for tool in tools
                ]
                return {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": mode, "tools": named},
                }
        return self.tool_choice
