"""Code of the user's own is found by one word, and what is wrong with it is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.user_code import load_object


def test_a_neighbour_wins_over_an_installed_module_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("NAME = 'neighbour'\n")
    file = tmp_path / "reads.py"
    file.write_text("import colorsys\nNAME = colorsys.NAME\n")
    kept = sys.modules.pop("colorsys", None)
    try:
        assert load_object(f"{file}:NAME", "reward") == "neighbour"
    finally:
        sys.modules.pop("colorsys", None)
        if kept is not None:
            sys.modules["colorsys"] = kept


def test_a_module_of_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nearby.py").write_text("WORD = 'found'\n")
    monkeypatch.chdir(tmp_path)
    assert load_object("nearby:WORD", "reward") == "found"


def test_a_module_is_named_as_python_names_it() -> None:
    assert load_object("json:dumps", "reward") is json.dumps


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("score", r"reward is 'score'; write FILE\.py:NAME"),
        ("nofile.py:score", r"nofile\.py is not there"),
        ("{folder}/my.py:nothing", r"my\.py has no nothing"),
        ("{folder}/broken.py:score", r"broken\.py cannot be imported: ZeroDivisionError"),
        ("no.such.module:score", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_code_that_is_not_there_is_named(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "my.py").write_text("")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigurationError, match=message):
        load_object(path.format(folder=tmp_path), "reward")
