"""Wrong calls of a model with numbers far ahead: each is refused, and the gateway keeps no row."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.tinker_wire import Wire
from tests.integration.servers import BASE_MODEL, Deployment, EmbeddedThread

_FAR = range(10**6, 10**6 + 200)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINSMITH_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "data"


@pytest.fixture
def deployment(folder: Path, tiny_model: Path) -> Iterator[Deployment]:
    server = EmbeddedThread(folder, tiny_model, {"scheduler": {"session_timeout_s": 3600.0}})
    yield server.start()
    server.stop()


def _num_rows(folder: Path) -> int:
    [path] = folder.rglob("gateway.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        [(num,)] = connection.execute("SELECT count(*) FROM futures").fetchall()
    return int(num)


def test_refused_numbers_leave_no_rows(deployment: Deployment, folder: Path) -> None:
    wire = Wire(f"http://{deployment.address}", {"x-api-key": deployment.api_key}, BASE_MODEL)
    with contextlib.closing(wire):
        model = wire.model()
        before = _num_rows(folder)
        for number in _FAR:
            wrong = model.batch(seq_id=number, loss_fn="no_such_loss")
            assert model.send(wrong).status_code == 429
        assert _num_rows(folder) == before
