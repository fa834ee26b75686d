"""Several servers on one machine: each has its file, and clients find one that runs."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.local_servers import local_server

import tinsmith
from tinsmith import cli
from tinsmith.local_servers import (
    Announcement,
    choose,
    chosen_address,
    list_servers,
    model_sources,
)
from tinsmith.settings import resolve_settings

FIRST, SECOND = "127.0.0.1:7377", "127.0.0.1:7379"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def other_pid() -> Iterator[int]:
    """A process that runs, and is not this one."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def both(state: Path, other_pid: int) -> Iterator[contextlib.ExitStack]:
    """Two servers; the stack ends the second, which is the newer one."""
    later = datetime.datetime(2026, 1, 2, 4, 0, tzinfo=datetime.UTC)
    second = local_server(SECOND, pid=other_pid, start_time=later, api_key="tsk_second")
    with Announcement(state, local_server(FIRST)), contextlib.ExitStack() as stack:
        stack.enter_context(Announcement(state, second))
        yield stack


def test_only_a_server_of_this_machine_tells_where_its_models_lie(state: Path) -> None:
    sources = {"tiny": "/models/tiny", "qwen": "Qwen/Qwen3-0.6B"}
    with Announcement(state, local_server(FIRST, model_sources=sources)):
        assert model_sources(state, FIRST) == sources
        assert model_sources(state, SECOND) == {}
    assert model_sources(state, FIRST) == {}


def address() -> str:
    return resolve_settings().address


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return int(caught.value.code or 0)


def leave_file(state: Path, address: str, *, pid: int) -> Path:
    """Leave what a server that was killed leaves: a file without a lock."""
    with Announcement(state, local_server(address, pid=pid, start_time=later(9))):
        path = state / "servers" / f"{pid}.json"
        content = path.read_text()
    path.write_text(content)
    return path


def later(hour: int) -> datetime.datetime:
    return datetime.datetime(2026, 1, 2, hour, tzinfo=datetime.UTC)


def test_the_newest_is_found_with_its_own_key_and_the_other_one_after_its_end(
    both: contextlib.ExitStack,
) -> None:
    settings = resolve_settings()
    assert (settings.address, settings.api_key) == (SECOND, "tsk_second")
    assert resolve_settings(address=FIRST).api_key == "tsk_test"
    both.close()
    assert address() == FIRST


def test_nothing_is_left_by_a_clean_end(state: Path) -> None:
    with Announcement(state, local_server(FIRST)):
        assert [server.is_running for server in list_servers(state)] == [True]
        mode = (state / "servers" / f"{os.getpid()}.json").stat().st_mode
        assert mode & 0o077 == 0  # the file holds a key
    assert list_servers(state) == []
    with pytest.raises(tinsmith.ConfigurationError, match="run `tinsmith up`"):
        resolve_settings()


def test_the_file_of_a_killed_server_leads_nowhere(state: Path, other_pid: int) -> None:
    with Announcement(state, local_server(FIRST)):
        # Its number belongs to another process by now; the file is newer than the first one's.
        path = leave_file(state, SECOND, pid=other_pid)
        assert [server.is_running for server in list_servers(state)] == [True, False]
        assert address() == FIRST
    with pytest.raises(tinsmith.ConfigurationError, match=r"7379, was killed.*up --data-dir /data"):
        resolve_settings()
    with Announcement(state, local_server(FIRST)):
        assert not path.exists()


def test_a_server_that_is_told_apart_by_its_process_alone(state: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with Announcement(state, local_server(FIRST, pid=process.pid)):
        assert [server.is_running for server in list_servers(state)] == [False]


def test_the_chosen_one_is_used_until_it_ends(state: Path, both: contextlib.ExitStack) -> None:
    assert run_command("use", "7377") == 0
    assert address() == FIRST
    assert run_command("use", "newest") == 0
    assert address() == SECOND
    assert run_command("use", SECOND) == 0
    both.close()  # a clean end takes the choice away
    assert chosen_address(state) == ""
    assert address() == FIRST


def test_a_chosen_one_that_was_killed_is_not_replaced_in_silence(
    state: Path, both: contextlib.ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(state, "127.0.0.1:7078")
    with pytest.raises(tinsmith.ConfigurationError, match=r"`tinsmith use 127.0.0.1:7379` or"):
        resolve_settings()
    assert run_command("status") == 0
    assert "does not run" in capsys.readouterr().out


def test_status_marks_what_is_used(
    both: contextlib.ExitStack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command("status") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"* {SECOND}  serves tiny  on cpu, float32"
    assert lines[2].startswith(f"  {FIRST}")
    assert "tinsmith use" in lines[-1]
    assert run_command("status", "--json") == 0
    text = capsys.readouterr().out
    assert [server["is_used"] for server in json.loads(text)] == [True, False]
    assert "tsk_" not in text
    monkeypatch.setenv("TINSMITH_ADDRESS", "elsewhere:1")
    assert run_command("status") == 0
    assert "* elsewhere:1  TINSMITH_ADDRESS" in capsys.readouterr().out


@pytest.mark.parametrize("with_server", [True, False])
def test_an_unknown_address_is_not_chosen(
    state: Path, with_server: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.ExitStack() as stack:
        if with_server:
            stack.enter_context(Announcement(state, local_server(FIRST)))
        assert run_command("use", "7078") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert (FIRST if with_server else "TINSMITH_ADDRESS") in error
    assert chosen_address(state) == ""


def test_a_file_that_can_not_be_read_is_named(state: Path) -> None:
    (state / "servers").mkdir(parents=True)
    (state / "servers" / "1.json").write_text("{")
    with pytest.raises(tinsmith.ConfigurationError, match=r"1\.json cannot be read.*delete it"):
        resolve_settings()


def test_the_project_of_a_server_goes_with_its_key(state: Path) -> None:
    with Announcement(state, local_server(FIRST, project="lab")):
        assert resolve_settings().project == "lab"
        assert resolve_settings(api_key="tsk_test").project == "lab"
        other = resolve_settings(api_key="tsk_other")
        assert (other.address, other.api_key) == (FIRST, "tsk_other")
        assert other.project != "lab"
