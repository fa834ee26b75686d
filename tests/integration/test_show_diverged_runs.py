"""A user is told that a replay of a run gave other bits: by the SDK and by the command line."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.servers import BASE_MODEL, EmbeddedThread

from tinsmith import cli


def test_a_diverged_run_is_shown(
    make_embedded: Callable[..., EmbeddedThread],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = make_embedded()
    with server.start().client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4)
        assert [info.replay_diverged for info in client.runs.list()] == [False]
    server.stop()
    [ledger] = tmp_path.rglob("trainer.db")
    with contextlib.closing(sqlite3.connect(ledger)) as connection:
        connection.execute("UPDATE runs SET replay_diverged = 1")
        connection.commit()
    deployment = server.start()
    with deployment.client() as client:
        client.runs.get(run.name)
        assert [info.replay_diverged for info in client.runs.list()] == [True]
        monkeypatch.setenv("TINSMITH_ADDRESS", deployment.address)
        monkeypatch.setenv("TINSMITH_API_KEY", deployment.api_key)
        with pytest.raises(SystemExit) as caught:
            cli.main(["runs", "list"])
        assert not caught.value.code
    heading, line = capsys.readouterr().out.splitlines()
    column = heading.index("REPLAY DIVERGED")
    assert line[column:].startswith("yes")
