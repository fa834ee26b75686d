"""`POST /tokenize` and `POST /detokenize`, as vLLM has them: nothing is drawn."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from starlette.responses import JSONResponse, Response

from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.json_lists import List
from tinsmith_gateway.openai.bodies import MAX_MESSAGES, MAX_TOOLS, ChatBody, Message, Token, Tool
from tinsmith_gateway.openai.chat import ChatCompletion
from tinsmith_gateway.openai.model_calls import ModelCalls
from tinsmith_gateway.openai.models import ModelList
from tinsmith_gateway.openai.translation import chat_of
from tinsmith_runtime.errors import InvalidFieldError


class TokenizeBody(pydantic.BaseModel):
    """Body of `POST /tokenize`: a text, or a conversation with what its template takes."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str = pydantic.Field(default="", max_length=512)
    prompt: str | None = None
    messages: List[Message] | None = pydantic.Field(
        default=None, min_length=1, max_length=MAX_MESSAGES
    )
    tools: List[Tool] | None = pydantic.Field(default=None, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool | None = None

    def to_chat(self) -> ChatBody:
        """Return the chat completion whose prompt is meant.

        Raises:
            InvalidFieldError: If a field cannot be held to.
        """
        if self.add_special_tokens:
            raise InvalidFieldError(
                "add_special_tokens", "is not offered for messages: the template writes them"
            )
        shown = {"messages", "tools", "chat_template_kwargs", "continue_final_message"}
        fields = self.model_dump(exclude_unset=True, include=shown)
        chat = chat_of(
            {
                **fields,
                "model": self.model,
                "add_generation_prompt": (
                    self.add_generation_prompt and not self.continue_final_message
                ),
            }
        )
        chat.check_offered()
        return chat


class DetokenizeBody(pydantic.BaseModel):
    """Body of `POST /detokenize`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str = pydantic.Field(default="", max_length=512)
    tokens: Annotated[List[Token], pydantic.Field(max_length=2**20)]


async def tokenize(calls: ModelCalls, models: ModelList, call: Call) -> Response:
    """Answer the tokens of a text, or of the prompt that a conversation becomes."""
    body = await call.parse(TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidFieldError("prompt", "or messages must be given, and not both")
    async with calls.target(call.credential, body.model) as target:
        if body.prompt is None:
            tokens = list((await ChatCompletion(calls, call, body.to_chat()).prepare()).tokens)
        else:
            adds = body.add_special_tokens is not False
            tokens = await calls.aside(
                target, _encode, target.tokenizer, body.prompt, adds, num_text=len(body.prompt)
            )
        texts = None
        if body.return_token_strs:
            texts = await calls.aside(target, _texts, target.tokenizer, tokens)
        limit = await models.context_of(call.credential, target.handle.base_model)
    return JSONResponse(
        {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": texts}
    )


async def detokenize(calls: ModelCalls, call: Call) -> Response:
    """Answer the text of token ids, special ones included."""
    body = await call.parse(DetokenizeBody)
    async with calls.target(call.credential, body.model) as target:
        text = await calls.aside(target, target.tokenizer.decode, body.tokens)
    return JSONResponse({"prompt": text})


def _encode(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return tokens


def _texts(tokenizer: Any, tokens: list[int]) -> list[str]:
    return [tokenizer.text_of(token) for token in tokens]
