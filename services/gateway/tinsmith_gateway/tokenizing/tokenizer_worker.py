"""`python -m`, as a confined process: a tokenizer whose files a stranger wrote."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tinsmith_gateway.tokenizing.model_tokenizer import ModelTokenizer
from tinsmith_runtime.confined.worker import Handle, serve

_MAX_DECODERS = 16


def begin(first: dict[str, Any]) -> Handle:
    """Return what answers requests about a tokenizer.

    Args:
        first: Holds the tokenizer's `files` by name.
    """
    files = {name: content.encode() for name, content in first["files"].items()}
    tokenizer = ModelTokenizer(files)

    @lru_cache(_MAX_DECODERS)
    def decoder(skip_special: bool, kept: tuple[str, ...]) -> Callable[..., str]:
        return tokenizer.decoder(skip_special=skip_special, kept=kept)

    def render(request: dict[str, Any]) -> str:
        return tokenizer.render_chat_template(
            request["messages"],
            add_generation_prompt=request["add_generation_prompt"],
            tools=request["tools"],
            **request["variables"],
        )

    def bytes_of(request: dict[str, Any]) -> str | None:
        content = tokenizer.bytes_of(request["token"])
        return None if content is None else content.hex()

    handlers: dict[str, Handle] = {
        "about": lambda _: {
            "chat_template": tokenizer.chat_template,
            "tool_template": tokenizer.tool_template,
            "image_token": tokenizer.image_token,
        },
        "encode": lambda request: tokenizer.encode(
            request["text"], add_special_tokens=request["add_special_tokens"]
        ),
        "decode": lambda request: decoder(request["skip_special"], tuple(request["kept"]))(
            request["tokens"]
        ),
        "render": render,
        "bytes_of": bytes_of,
        "text_of": lambda request: tokenizer.text_of(request["token"]),
    }
    return lambda request: handlers[request["method"]](request)


if __name__ == "__main__":
    serve(begin)
