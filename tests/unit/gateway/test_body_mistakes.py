"""A body with a mistake in each of a million values is refused by its first one."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

import tinsmith_gateway
from tinsmith.text.tokenizer import Tokenizer
from tinsmith_gateway.endpoint import parse_json
from tinsmith_gateway.openai.bodies import ChatBody, CompletionBody
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model
from tinsmith_runtime.errors import InvalidFieldError


def subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def bodies() -> list[type[pydantic.BaseModel]]:
    for module in pkgutil.walk_packages(tinsmith_gateway.__path__, "tinsmith_gateway."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = {
        each for each in subclasses(pydantic.BaseModel) if each.__module__.startswith("tinsmith_g")
    }
    return sorted(found, key=lambda each: (each.__module__, each.__qualname__))


def lists_of(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for each in schema.values():
            yield from lists_of(each)
    elif isinstance(schema, list | tuple):
        for each in schema:
            yield from lists_of(each)


def test_every_list_of_every_body_ends_at_its_first_mistake() -> None:
    found = {body: list(lists_of(body.__pydantic_core_schema__)) for body in bodies()}
    assert sum(map(len, found.values())) > 20
    wrong = [body.__qualname__ for body, lists in found.items() if not all(map(_ends, lists))]
    assert wrong == []


def _ends(schema: dict[str, Any]) -> bool:
    return bool(schema.get("fail_fast"))


@pytest.mark.parametrize(
    ("model", "body", "field"),
    [
        (CompletionBody, {"prompt": [-1] * 5000}, "prompt"),
        (CompletionBody, {"prompt": [[-1] * 5000] * 2}, "prompt"),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 5000}]}, "messages.0.content"),
        (
            ChatBody,
            {
                "messages": [{"role": "user", "content": "x"}],
                "logit_bias": {str(number): "x" for number in range(5000)},
            },
            "body",
        ),
    ],
)
def test_the_first_mistake_is_named(
    model: type[pydantic.BaseModel], body: dict[str, Any], field: str
) -> None:
    sent = json.dumps({"model": "tiny", **body}).encode()
    with pytest.raises(InvalidFieldError, match=f"^{field}"):
        parse_json(sent, model)


def test_other_threads_run_while_a_long_text_becomes_tokens(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, TinyModelConfig())
    tokenizer = Tokenizer({path.name: path.read_bytes() for path in folder.iterdir()})
    text = "1" * 50_000
    go, ran = threading.Event(), threading.Event()

    def wait() -> None:
        go.wait()
        ran.set()

    thread = threading.Thread(target=wait)
    thread.start()
    interval_s = sys.getswitchinterval()
    # From here on the other thread runs only where a call lets go of the interpreter.
    sys.setswitchinterval(3600)
    try:
        go.set()
        has_run = False
        for _ in range(50):
            tokens = tokenizer.encode(text)
            has_run = has_run or ran.is_set()
            if has_run:
                break
    finally:
        sys.setswitchinterval(interval_s)
    thread.join()
    assert tokenizer.decode(tokens) == text
    assert has_run
