"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, as those of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pydantic

from tinsmith_gateway.anthropic.conversation import Messages, messages_of
from tinsmith_gateway.json_lists import List
from tinsmith_gateway.openai.bodies import MAX_MESSAGES, MAX_TOOLS, ChatBody, Limit
from tinsmith_gateway.openai.translation import SAME_FIELDS, chat_of, check_offered
from tinsmith_runtime.errors import InvalidFieldError

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "container": (None,),
    "context_management": (None, {}),
    "diagnostics": (None,),
    "fallbacks": (None, []),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
    "speed": (None, "standard"),
    "thinking": (None, {"type": "disabled"}),
}
"""Each with the values that ask for nothing."""
_REASONS = {
    "container": "is not offered: nothing is kept on the server",
    "mcp_servers": "is not offered: the server runs no tools",
    "thinking": "is not offered: a model thinks as its chat template has it; leave it out",
}
_HARMLESS = frozenset(
    {"cache_control", "metadata", "service_tier", "user_profile_id", "workspace_id"}
)
"""Name the user of a client, or say how work is billed or cached."""


class CustomTool(pydantic.BaseModel):
    """A function; tools that a server runs by itself, or that have a type, are not offered."""

    model_config = pydantic.ConfigDict(extra="forbid")

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        """Return it as a tool of a chat completion."""
        fields = self.model_dump(exclude_none=True, include={"name", "description"})
        fields["parameters"] = self.input_schema
        if self.strict:
            fields["strict"] = True
        return {"type": "function", "function": fields}


class ToolChoice(pydantic.BaseModel):
    """Which tools the model calls."""

    model_config = pydantic.ConfigDict(extra="forbid")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def to_chat(self) -> str | dict[str, Any]:
        """Return it as that of a chat completion.

        Raises:
            InvalidFieldError: If a tool is meant and none is named.
        """
        if self.type != "tool":
            return {"auto": "auto", "any": "required", "none": "none"}[self.type]
        if self.name is None:
            raise InvalidFieldError("tool_choice.name", "is missing")
        return {"type": "function", "function": {"name": self.name}}


class OutputFormat(pydantic.BaseModel):
    """The form of the answer."""

    model_config = pydantic.ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    schema_: dict[str, Any] = pydantic.Field(alias="schema")


class OutputConfig(pydantic.BaseModel):
    """What is said of the answer; how much effort it takes is not offered."""

    model_config = pydantic.ConfigDict(extra="forbid")

    format: OutputFormat | None = None
    effort: None = None


class CountBody(pydantic.BaseModel):
    """Body of `POST /v1/messages/count_tokens`."""

    # Other fields are looked at by `to_chat`, which refuses all but harmless ones.
    model_config = pydantic.ConfigDict(extra="allow", allow_inf_nan=False)

    model: str = pydantic.Field(default="", max_length=512)
    messages: List[dict[str, Any]] = pydantic.Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | List[dict[str, Any]] | None = None
    tools: List[CustomTool] | None = pydantic.Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None

    def conversation(self) -> Messages:
        """Return the messages of the chat.

        Raises:
            InvalidFieldError: Naming the block that has no place in it.
        """
        found = messages_of(self.messages, self.system)
        if len(found.messages) > MAX_MESSAGES:
            raise InvalidFieldError("messages", f"must be at most {MAX_MESSAGES} with results")
        return found

    def to_chat(self, conversation: Messages) -> ChatBody:
        """Return the body of the chat completion that draws the same sample.

        Raises:
            InvalidFieldError: Naming the first field that is unknown or not offered.
        """
        extra = self.model_extra or {}
        check_offered(extra, reasons=_REASONS, neutral=_NEUTRAL, passed=SAME_FIELDS | _HARMLESS)
        choice = self.tool_choice
        is_begun = _is_begun(conversation)
        form = None if self.output_config is None else self.output_config.format
        fields = {
            "model": self.model,
            "messages": conversation.messages,
            "tools": [tool.to_chat() for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else choice.to_chat(),
            "parallel_tool_calls": (
                False if choice is not None and choice.disable_parallel_tool_use else None
            ),
            "response_format": None
            if form is None
            else {"type": "json_schema", "json_schema": {"schema": form.schema_}},
            "continue_final_message": is_begun,
            "add_generation_prompt": not is_begun,
            **self._sampling(),
            **{name: extra[name] for name in SAME_FIELDS & set(extra)},
        }
        return chat_of(fields)

    def _sampling(self) -> dict[str, Any]:
        """Return the fields of a chat completion that say how the answer is drawn."""
        return {}


class MessagesBody(CountBody):
    """Body of `POST /v1/messages`."""

    max_tokens: Limit
    stop_sequences: List[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def _sampling(self) -> dict[str, Any]:
        return {
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
        }


def _is_begun(conversation: Messages) -> bool:
    """Return whether the conversation ends in an answer that the model goes on with.

    Raises:
        InvalidFieldError: If the answer has no text behind which it could.
    """
    last = conversation.messages[-1]
    if last["role"] != "assistant":
        return False
    if last["content"] is None or "tool_calls" in last:
        raise InvalidFieldError(
            conversation.origins[-1],
            "is an answer that ends with a call; send its result, or a text to go on with",
        )
    return True
