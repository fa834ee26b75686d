"""The command line against the fake server."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pytest
from google.rpc import code_pb2
from tests.fakes.local_servers import local_server
from tests.fakes.sdk_fake_server import RUN, FakeServer, make_status
from tests.unit.sdk.test_tokenizer import CHATML, make_files

from tinsmith import cli
from tinsmith.cli.output import show_list
from tinsmith.config_values import load_config
from tinsmith.errors import ConfigurationError
from tinsmith.local_servers import Announcement


@dataclasses.dataclass(frozen=True)
class Inner:
    learning_rate: float = 1e-4


@dataclasses.dataclass(frozen=True)
class Config:
    base_model: str
    num_steps: int = 10
    shuffle: bool = True
    log_path: Path | None = None
    stop: tuple[str, ...] = ()
    mode: Literal["sync", "async"] = "sync"
    adam: Inner = dataclasses.field(default_factory=Inner)
    clip: float | str = "off"


@pytest.fixture
def local(server: FakeServer, tmp_path: Path) -> Iterator[FakeServer]:
    """A server that `tinsmith up` announced."""
    with Announcement(tmp_path / "state", local_server(server.address)):
        yield server


def invoke(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return int(caught.value.code or 0)


def test_runs_are_listed_as_a_table_and_as_json(
    local: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert invoke("runs", "list") == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert "BASE MODEL" in heading
    assert row.startswith("run-1 ")
    assert row.split()[2:5] == ["7", "reward", "0.5"]
    assert invoke("runs", "list", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == RUN


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    note: str
    size_bytes: int
    create_time: datetime.datetime


def rows() -> list[Row]:
    # Of the moment: what was made when the module was read is older by the time it is shown.
    now = datetime.datetime.now(datetime.UTC)
    return [
        Row(f"{RUN}/checkpoints/final", "long " * 30, 2_954_991, time)
        for time in (
            now - datetime.timedelta(minutes=3),
            now + datetime.timedelta(days=7, minutes=1),
        )
    ]


COLUMNS = {"name": "NAME", "note": "NOTE", "size_bytes": "SIZE", "create_time": "AGE"}


def test_a_table_is_a_line_for_each_row_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    show_list(rows(), COLUMNS, as_json=False)
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NAME", "NOTE", "SIZE", "AGE"]
    assert first.split()[0] == "run-1/final"
    assert "long long long" in first
    assert first.split()[-3:] == ["3.0", "MB", "3m"]
    assert second.endswith("in 7d")


def test_a_table_fits_the_terminal_and_keeps_the_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    show_list(rows(), COLUMNS, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) == 60
    assert lines[1].startswith("run-1/final  long")
    assert "…  3.0 MB  3m" in lines[1]


def test_what_a_table_shows_is_taken_by_commands(local: FakeServer) -> None:
    assert invoke("checkpoints", "delete", "run-1/a") == 0
    assert local.state.last["DeleteCheckpoint"].name == f"{RUN}/checkpoints/a"
    assert invoke("checkpoints", "delete", "run-1/checkpoints/b") == 0
    assert local.state.last["DeleteCheckpoint"].name == f"{RUN}/checkpoints/b"


def test_runs_and_checkpoints_are_deleted(
    local: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("runs", "delete", "run-1") == 0
    assert invoke("checkpoints", "delete", f"{RUN}/checkpoints/a") == 0
    assert local.state.last["DeleteCheckpoint"].name == f"{RUN}/checkpoints/a"
    assert invoke("checkpoints", "list", "--json", "--run", "run-1") == 0
    assert capsys.readouterr().out.endswith("[]\n")


def test_the_past_of_a_run_is_kept_for_so_long(
    local: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("runs", "keep", "run-1", "--for", "30d") == 0
    assert capsys.readouterr().out == f"{RUN}: its past is kept for 720 h\n"
    sent = local.state.last["UpdateTrainingRun"]
    assert (sent.name, sent.history_retention.ToSeconds()) == (RUN, 30 * 86_400)
    assert invoke("runs", "keep", "run-1", "--for", "30d", "--json") == 0
    assert json.loads(capsys.readouterr().out)["history_retention_seconds"] == 30 * 86_400
    assert invoke("runs", "keep", "run-1", "--for", "long") == 2
    assert "is no time" in capsys.readouterr().err


def test_a_new_key_is_shown_once_in_both_spellings(
    local: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("keys", "create", "--for", "laptop", "--role", "admin", "--project", "b") == 0
    shown = capsys.readouterr().out
    assert "secret: tsk_k1_secret\n" in shown
    assert "tinker_secret: tml-k1_secret\n" in shown
    # The reader needs no more than to paste a line.
    assert f"export TINSMITH_ADDRESS={local.address} TINSMITH_API_KEY=tsk_k1_secret\n" in shown
    assert f"export TINKER_BASE_URL=http://{local.address} TINKER_API_KEY=tml-k1_secret\n" in shown
    request = local.state.last["CreateKey"]
    assert (request.parent, request.display_name) == ("projects/b", "laptop")
    assert request.role == "admin"
    assert invoke("keys", "create", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tinker_secret"] == "tml-k1_secret"
    assert local.state.last["CreateKey"].role == "member"
    assert invoke("keys", "list") == 0
    shown = capsys.readouterr().out
    assert "k1  " in shown
    assert "secret" not in shown


def test_keys_are_revoked_by_id_or_name(
    local: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("keys", "revoke", "k1", "projects/b/keys/k2") == 0
    assert capsys.readouterr().out == (
        "revoked projects/default/keys/k1\nrevoked projects/b/keys/k2\n"
    )
    assert invoke("keys", "revoke", "k1", "--project", "c") == 0
    assert local.state.last["RevokeKey"].name == "projects/c/keys/k1"


def test_a_sample_goes_through_the_chat_template(
    local: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    local.state.tokenizer_files = make_files(CHATML)
    assert invoke("sample", "--base-model", "tiny", "--prompt", "hello", "--json") == 0
    assert json.loads(capsys.readouterr().out)["samples"][0]["tokens"] == [0, 1, 2]
    templated = len(local.state.last["Sample"].prompt.chunks[0].tokens.data)
    assert invoke("sample", "--base-model", "tiny", "--prompt", "hello", "--raw") == 0
    assert len(local.state.last["Sample"].prompt.chunks[0].tokens.data) < templated


def test_an_answer_without_text_is_told_beside_it(
    local: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local.state.tokenizer_files = make_files(CHATML)
    monkeypatch.setattr("tinsmith.text.tokenizer.Tokenizer.decode", lambda *_, **__: " ")
    assert invoke("sample", "hello", "--base-model", "tiny") == 0
    printed = capsys.readouterr()
    assert printed.out == " \n"
    assert printed.err.startswith("the answer is empty: ")


def test_a_prompt_that_is_too_long_is_told_once_what_to_do(
    local: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    local.state.tokenizer_files = make_files(CHATML)
    text = "the prompt has 9 tokens and leaves no room in the context of 8; shorten it"
    status = make_status(code_pb2.RESOURCE_EXHAUSTED, "SEQUENCE_TOO_LONG", text)
    local.state.fail_calls["Sample"] = [status]
    assert invoke("sample", "hello", "--base-model", "tiny") == 1
    assert capsys.readouterr().err == f"error: {text} (SEQUENCE_TOO_LONG)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["runs", "list"], "run `tinsmith up`", id="no-server"),
        pytest.param(["run", "nothing"], "use one of supervised, rl", id="no-recipe"),
        pytest.param(["run", "cli.x"], "there is no recipe", id="not-a-name"),
    ],
)
def test_failures_are_one_line_with_the_remedy(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert invoke(*arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_failure_of_the_server_is_one_line(
    local: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    status = make_status(code_pb2.PERMISSION_DENIED, "ROLE_MISSING", "needs admin\nscope")
    local.state.fail_calls["ListTrainingRuns"] = [status]
    assert invoke("runs", "list") == 1
    assert capsys.readouterr().err.startswith("error: needs admin scope (ROLE_MISSING); use a key")


def test_a_recipe_is_given_its_configuration(
    local: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    module = types.ModuleType("tinsmith.recipes.supervised")
    module.Config = Config  # type: ignore[attr-defined]
    module.main = lambda config, client: seen.append((config, client.address))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = tmp_path / "config.toml"
    path.write_text('base_model = "tiny"\nnum_steps = 5\n[adam]\nlearning_rate = 1\n')
    assert invoke("run", "supervised", "--config", str(path), "num_steps=1_000") == 0
    assert seen == [(Config("tiny", num_steps=1000, adam=Inner(1.0)), local.address)]


def test_values_are_parsed_by_their_annotation() -> None:
    words = ["base_model=t", "shuffle=no", "log_path=a/b", "stop=x,y", "mode=async", "clip=0.2"]
    config = load_config(Config, None, [*words, "adam.learning_rate=3e-4"])
    assert config == Config("t", 10, False, Path("a/b"), ("x", "y"), "async", Inner(3e-4), clip=0.2)
    assert load_config(Config, None, ["base_model=t", "log_path=none"]).log_path is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["base_model=t", "num_step=3"], "did you mean num_steps", id="close"),
        pytest.param(["base_model=t", "adam.rate=3"], "adam.rate; .*learning_rate", id="nested"),
        pytest.param(["base_model=t", "num_steps=x"], "num_steps is 'x'.* int", id="int"),
        pytest.param(["base_model=t", "mode=later"], "sync, async", id="literal"),
        pytest.param(["num_steps=3"], "base_model is missing", id="missing"),
        pytest.param(["base_model"], "write key=value", id="no-equals"),
    ],
)
def test_wrong_settings_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_config(Config, None, words)


def test_a_command_whose_extra_is_missing_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = metadata.EntryPoint("up", "tinsmith_nowhere.commands:up", "tinsmith.commands")
    monkeypatch.setattr("tinsmith.cli.app.entry_points", lambda group: [point])
    assert invoke("up", "--port", "0") == 1
    assert "pip install 'tinsmith[nowhere]'" in capsys.readouterr().err
    assert invoke("--help") == 0
    assert "up" in capsys.readouterr().out


def test_a_command_of_an_extra_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("tinsmith_extra")

    def up(port: int = 1) -> None:
        sys.stdout.write(f"port {port}\n")

    module.up = up  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tinsmith_extra", module)
    point = metadata.EntryPoint("up", "tinsmith_extra:up", "tinsmith.commands")
    monkeypatch.setattr("tinsmith.cli.app.entry_points", lambda group: [point])
    assert invoke("up", "--port", "7") == 0
    assert capsys.readouterr().out == "port 7\n"


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("--version") == 0
    assert capsys.readouterr().out == f"tinsmith {metadata.version('tinsmith')}\n"


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_describes_commands_of_other_packages(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert invoke(option) == 0
    text = capsys.readouterr().out
    assert "Run all services in this process" in text
    assert "See `tinsmith" not in text
