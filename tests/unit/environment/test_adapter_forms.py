"""What adapters read before anything is played: actions, observations, and what is installed."""

from __future__ import annotations

import base64
import sys
import types
from typing import Any

import pytest
from tests.fakes.pictures import picture

from tinsmith.environments.adapters import openenv_views as views
from tinsmith.environments.adapters.openenv import OpenEnvEnvironment
from tinsmith.environments.adapters.openenv_actions import ActionForm
from tinsmith.environments.adapters.verifiers import VerifiersEnvironment
from tinsmith.environments.environment import Observation
from tinsmith.errors import ConfigurationError
from tinsmith_environment.registry import adapted

TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
METADATA = {"type": "object"}


def form(required: list[str], **properties: Any) -> ActionForm:
    return ActionForm.of_schema({"properties": properties, "required": required})


@pytest.mark.parametrize(
    ("found", "field"),
    [
        pytest.param(form(["message"], message=TEXT, metadata=METADATA), "message", id="one"),
        pytest.param(form(["code"], code=TEXT, timeout=NUMBER), "code", id="required"),
        pytest.param(
            form([], text={"anyOf": [TEXT, {"type": "null"}]}, limit=NUMBER), "text", id="optional"
        ),
        pytest.param(
            form([], kind={"const": "say", "type": "string"}, text=TEXT), "text", id="constant"
        ),
        pytest.param(form(["a", "b"], a=TEXT, b=TEXT), "", id="two"),
        pytest.param(form(["a", "b"], a=TEXT, b=NUMBER), "", id="other-required"),
        pytest.param(form(["move"], move=NUMBER), "", id="number"),
    ],
)
def test_the_field_that_takes_a_text(found: ActionForm, field: str) -> None:
    assert found.text_field == field
    assert not found.has_tools


def test_calls_of_tools_are_known_by_their_fields() -> None:
    found = form(["tool_name"], tool_name=TEXT, arguments={"type": "object"}, metadata=METADATA)
    assert found.has_tools
    assert found.fields == "tool_name (string), arguments (object)"


@pytest.mark.parametrize(
    ("observation", "shown"),
    [
        pytest.param({"hint": "low", "done": False, "reward": 1.0}, "low", id="one"),
        pytest.param({"a": 1, "b": [1, 2], "metadata": {"x": 1}}, "a: 1\nb: [1, 2]", id="several"),
        pytest.param({"a": "", "metadata": {"message": "Begin."}}, "Begin.", id="metadata"),
        pytest.param({}, "", id="nothing"),
        pytest.param("Go.", "Go.", id="text"),
    ],
)
def test_an_observation_as_text(observation: Any, shown: str) -> None:
    assert views.show(observation) == shown


def test_answers_of_tools() -> None:
    image = picture(28, 28)
    data = base64.b64encode(image.data).decode()
    blocks = [{"type": "text", "text": "5"}, {"type": "image", "data": data}]
    blocks[1]["mimeType"] = "image/png"
    assert views.show_answer({"result": {"content": blocks[:1], "data": 5}}) == ("5", ())
    parts, images = views.show_answer({"result": {"content": blocks}})
    assert parts == [{"type": "text", "text": "5"}, {"type": "image"}]
    assert images == [image]
    assert views.show_answer({"result": {"content": [], "data": [5]}}) == ("[5]", ())
    assert views.show_answer({"result": {"a": 1}}) == ('{"a": 1}', ())
    failed = {"result": None, "error": {"error_type": "timeout", "message": "too long"}}
    assert views.show_answer(failed) == ("error: too long", ())


def test_what_a_render_returns_stands_behind_the_instruction() -> None:
    image = picture(28, 28)
    shown = views.to_observation([image, {"type": "text", "text": "b"}], "a")
    assert shown.images == (image,)
    assert [part["text"] for part in shown.messages[0].content] == ["a", "b"]  # type: ignore[index]
    assert views.to_observation("", "") == Observation()


@pytest.mark.parametrize("library", ["verifiers", "openenv"])
def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ConfigurationError, match=f"need {library}.*not installed.*pip install"):
        (VerifiersEnvironment if library == "verifiers" else OpenEnvEnvironment)("http://a")


def test_headers_belong_to_the_client_that_is_made() -> None:
    with pytest.raises(ConfigurationError, match="headers"):
        OpenEnvEnvironment(lambda: None, headers={"Authorization": "Bearer x"})


def test_a_client_that_is_shared_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a client of its own"):
        OpenEnvEnvironment(3)


@pytest.mark.parametrize(
    "word", ["verifiers:sums", "openenv:http://127.0.0.1:8000", "gymnasium:CartPole-v1"]
)
def test_ids_of_libraries_name_their_adapters(word: str) -> None:
    path, settings = adapted(word)
    library, _, name = word.partition(":")
    assert path.startswith(f"tinsmith.environments.adapters.{library}:")
    assert settings == {"env": name}


def test_an_older_verifiers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", types.ModuleType("verifiers.v1"))
    monkeypatch.setattr("tinsmith.environments.adapters.verifiers.version", lambda library: "0.2.1")
    with pytest.raises(ConfigurationError, match=r"verifiers is 0\.2\.1.*pip install"):
        VerifiersEnvironment("gsm8k")
