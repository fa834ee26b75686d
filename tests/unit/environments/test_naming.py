"""What `environment=` names: four forms, and one line for what has none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinsmith.environments.environment import Action, Environment, Observation, StepResult
from tinsmith.environments.naming import choose_served, read_environment
from tinsmith.errors import ConfigurationError

SERVED = {
    "projects/p/environments/guessing": True,
    "projects/p/environments/math": True,
    "projects/p/environments/maze": False,
}
CODE = """
from tinsmith.environments.environment import Environment

class Echo(Environment):
    def reset(self, seed, config): ...
    def step(self, action): ...

def score(row, completion): ...
"""


class Given(Environment):
    """A class that a program gives as it is."""

    def reset(self, seed: int, config: Any) -> Observation:
        """Show nothing."""
        return Observation()

    def step(self, action: Action) -> StepResult:
        """End."""
        return StepResult(Observation(), 0.0, done=True)


def test_a_file_and_a_module_name_one_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_echo.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    for word in (f"{tmp_path}/named_echo.py:Echo", "named_echo:Echo"):
        named = read_environment(word, "environment")
        assert named.environment_class is not None
        assert named.environment_class.__name__ == "Echo"
        assert (named.given, named.is_at_scheduler) == (word, False)


def test_a_class_is_named_by_its_module() -> None:
    named = read_environment(Given, "environment")
    assert named.environment_class is Given
    assert named.given == f"{__name__}:Given"


@pytest.mark.parametrize("word", ["maze", "projects/p/environments/maze"])
def test_a_name_is_that_of_the_scheduler(word: str) -> None:
    named = read_environment(word, "environment")
    assert named.is_at_scheduler
    found = choose_served(named, SERVED, "environment")
    assert (found.given, found.name) == (word, "projects/p/environments/maze")


@pytest.mark.parametrize("word", ["grpc://10.0.0.1:7090", "grpc://10.0.0.1:7090/"])
def test_an_address_means_the_environment_that_its_server_was_started_with(word: str) -> None:
    named = read_environment(word, "environment")
    assert (named.address, named.name, named.is_at_scheduler) == ("10.0.0.1:7090", "", False)
    found = choose_served(named, SERVED, "environment")
    assert found.given == "grpc://10.0.0.1:7090/maze"
    assert found.name == "projects/p/environments/maze"
    # What was found is found again by how it is called then.
    assert (
        choose_served(read_environment(found.given, "environment"), SERVED, "environment") == found
    )


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("", "environment is ''"),
        ("two words", "environment is 'two words'"),
        ("http://host:1/maze", "no address of an environment server"),
        ("grpc://", "which is no address"),
        ("grpc://host", "which is no address"),
        ("grpc://host:port/maze", "which is no address"),
        ("grpc://host:1/two/names", "'two/names' is no name of an environment"),
    ],
)
def test_what_has_no_form_is_one_line_with_the_forms(word: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_environment(word, "environment")
    said = str(caught.value)
    assert why in said
    assert "a served name, FILE.py:CLASS, MODULE:CLASS, or grpc://HOST:PORT[/NAME]" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("nofile.py:Echo", r"nofile\.py is not there"),
        ("no.such.module:Echo", "cannot be imported: ModuleNotFoundError"),
        ("json:dumps", "json:dumps is no environment; derive it from"),
        (int, "builtins:int is no environment"),
        (7, "7 is no environment"),
    ],
)
def test_a_class_that_cannot_be_had_is_said(word: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        read_environment(word, "environment")


@pytest.mark.parametrize("word", ["chess", "projects/other/environments/maze", "my.py"])
def test_a_name_that_is_not_served_is_said_with_those_that_are(word: str) -> None:
    with pytest.raises(ConfigurationError, match="served are guessing, math, maze; give a served"):
        choose_served(read_environment(word, "environment"), SERVED, "environment")


def test_an_address_of_several_needs_a_name() -> None:
    served = SERVED | {"projects/p/environments/pole": False}
    with pytest.raises(ConfigurationError, match="guessing, math, maze, pole; name one of them"):
        choose_served(read_environment("grpc://host:1", "environment"), served, "environment")
