"""A few hundred hostile requests; `make fuzz` sends 50,000 of all sorts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.fuzz.attack import attack
from tests.integration.servers import BASE_MODEL, create_key, embedded_server


def test_hostile_requests_leave_the_gateway_whole(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_STATE_DIR", str(tmp_path / "state"))
    settings = {"long_poll_s": 0.05}
    with embedded_server(tmp_path, model_dir, gateway=settings) as deployment:
        tally = asyncio.run(
            attack(
                f"http://{deployment.address}",
                deployment.api_key,
                create_key(deployment, "neighbour"),
                BASE_MODEL,
                count=300,
                seed=0,
            )
        )
    assert not tally.failures, "\n".join(tally.failures)
    assert sum(tally.statuses.values()) >= 300
    assert {"batch", "bytes", "head"} <= {sort for sort, _ in tally.statuses}
