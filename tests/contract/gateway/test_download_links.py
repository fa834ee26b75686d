"""Links to files end with the key that asked for them."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.tinker_wire import Wire
from tests.integration.servers import BASE_MODEL, Deployment, EmbeddedThread
from tests.support.wait import eventually

_SECONDS = 10.0
"""How long a revoked key may still open something."""


@pytest.fixture
def deployment(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Deployment]:
    monkeypatch.setenv("TINSMITH_STATE_DIR", str(tmp_path / "state"))
    scheduler = {"session_timeout_s": 3600.0}
    server = EmbeddedThread(tmp_path / "data", tiny_model, {"scheduler": scheduler})
    yield server.start()
    server.stop()


def _fetch(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


async def test_links_end_with_their_key(deployment: Deployment) -> None:
    with deployment.client() as operator:
        key = operator.keys.create()
        wire = Wire(f"http://{deployment.address}", {"x-api-key": key.secret}, BASE_MODEL)
        with contextlib.closing(wire):
            model = wire.model()
            model.train()
            wire.result(model.ask("save_weights_external", path="out"))
            where = f"training_runs/{model.id}/checkpoints/external_weights/out"
            urls = wire.http.get(f"{where}/external_weights_urls").json()["urls"]
            trace = wire.http.get(f"sessions/{wire.session_id}/trace_export").json()["url"]
        links = [*urls.values(), trace]
        assert {_fetch(link)[0] for link in links} == {200}
        operator.keys.revoke(key.name)

        def is_refused() -> bool:
            return all(_fetch(link)[0] == 403 for link in links)

        await eventually(is_refused, timeout_s=_SECONDS)
        for link in links:
            assert json.loads(_fetch(link)[1])["reason"] == "DOWNLOAD_TOKEN_INVALID"
