"""`tinsmith run RECIPE --dry-run`: what would be trained on, and nothing made on the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.local_servers import local_server
from tests.fakes.sdk_fake_server import FakeServer
from tests.unit.sdk.test_cli import invoke
from tests.unit.sdk.test_tokenizer import CHATML, make_files

from tinsmith.local_servers import Announcement

FIRST = {
    "messages": [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": "de"},
        {"role": "user", "content": "fg"},
        {"role": "assistant", "content": "hi"},
    ]
}
PAIR = {"question": "abc", "answer": "de"}
LONG = {"question": "abc" * 40_000, "answer": "de"}
PREFERENCE = {"prompt": "abc", "chosen": "de", "rejected": "fg"}


@pytest.fixture(autouse=True)
def local(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeServer]:
    """A server that `tinsmith up` announced."""
    monkeypatch.chdir(tmp_path)
    server.state.tokenizer_files = make_files(CHATML)
    with Announcement(tmp_path / "state", local_server(server.address)):
        yield server


def write(*rows: dict[str, Any]) -> str:
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return "data=rows.jsonl"


def shown(capsys: pytest.CaptureFixture[str], *words: str, recipe: str = "supervised") -> list[str]:
    assert invoke("run", recipe, *words, "--dry-run") == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("words", "trained", "first"),
    [
        pytest.param([], "2 of 3 answers, train_on=last; 1 rows say", "⟦hi", id="last"),
        pytest.param(
            ["chat_template=role_colon"], "2 of 3 answers", "User: fg\n\nAssistant:⟦ hi", id="named"
        ),
        pytest.param(["train_on=all"], "3 of 3 answers, train_on=all; 1 rows", "⟦de", id="all"),
        pytest.param(
            ["learning_rate=1e-3,1e-2"], "2 of 3 answers, train_on=last", "⟦hi", id="sweep"
        ),
    ],
)
def test_rows_are_counted_and_the_first_is_shown_without_a_run(
    local: FakeServer,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    trained: str,
    first: str,
) -> None:
    lines = shown(capsys, write(FIRST, PAIR), *words)
    assert lines[0] == "rows: 2 of rows.jsonl (1 as messages, 1 as question and answer)"
    assert lines[1].startswith(f"trained on: {trained}")
    assert lines[2].startswith("tokens: ")
    assert " median, " in lines[2]
    assert lines[3].endswith(": 0")
    assert first in "\n".join(lines[5:])
    assert not local.state.calls["CreateTrainingRun"]
    assert not local.state.calls["CreateSamplingSession"]
    assert not Path("runs").exists()


def test_what_weighs_something_is_counted_in_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    one = shown(capsys, write(PAIR))[2]
    two = shown(capsys, write(PAIR, PAIR))[2]
    # The answer is two letters, and its end.
    assert " 3 of " in one
    assert " 6 of " in two
    assert one.split(";")[0] == two.split(";")[0]


def test_pairs_are_shown_without_a_reference(
    local: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, write(PREFERENCE, PREFERENCE), recipe="dpo")
    assert lines[0] == "rows: 2 of rows.jsonl (2 as pairs)"
    text = "\n".join(lines)
    assert "⟦de" in text
    assert "⟦fg" in text
    assert not local.state.calls["CreateSamplingSession"]


def test_the_shipped_data_are_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "data=pig_latin", "batch_size=4")[0].startswith("rows: 4 of the first")


def test_a_row_that_is_too_long_is_counted_and_refused_as_a_run_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write(PAIR, LONG)
    assert invoke("run", "supervised", data, "--dry-run") == 1
    output = capsys.readouterr()
    assert "tokens: 1 (rows.jsonl:2); too_long=refuse" in output.out
    assert "rows.jsonl:2: has " in output.err
    assert "1 (rows.jsonl:2); too_long=leave_out" in "".join(
        shown(capsys, data, "too_long=leave_out")
    )


@pytest.mark.parametrize(
    ("environment", "has_colours"),
    [
        pytest.param({"FORCE_COLOR": "1"}, True, id="terminal"),
        pytest.param({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, id="no-color"),
        pytest.param({}, False, id="pipe"),
    ],
)
def test_colours_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    has_colours: bool,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[" in "\n".join(shown(capsys, write(PAIR)))) is has_colours


def test_a_recipe_without_rows_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("run", "rl", "--dry-run") == 1
    assert "use it with supervised or dpo" in capsys.readouterr().err
