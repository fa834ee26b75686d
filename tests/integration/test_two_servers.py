"""Two servers of one user: each is found, and neither takes the clients of the other with it."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.wait import until

import tinsmith
from tinsmith.settings import resolve_settings
from tinsmith_local.process import ServerProcess


@pytest.fixture
def servers(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[ServerProcess]]:
    """Two that keep their state where the tests do; the second was started last."""
    state = {"TINSMITH_STATE_DIR": str(tmp_path / "state")}
    monkeypatch.setenv("TINSMITH_STATE_DIR", state["TINSMITH_STATE_DIR"])
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("first", "second"):
            server = ServerProcess(tmp_path / name, {"tiny": model_dir}, environment=state)
            made.append(stack.enter_context(server))
            until(lambda at=server: "Ctrl-C" in at.log.read_text())  # type: ignore[misc]
        yield made


def test_a_second_server_gives_the_clients_back(servers: list[ServerProcess]) -> None:
    first, second = servers
    assert resolve_settings().address == second.address
    banner = second.log.read_text()
    assert f"Also running: {first.address}, data {first.data_dir}" in banner
    assert "Also running" not in first.log.read_text()
    assert "  device   " in banner
    for each in servers:
        log = each.data_dir / "server.log"
        assert f"  log      {log}, and here" in each.log.read_text()
        assert stat.S_IMODE(log.stat().st_mode) == 0o600

    second.stop()
    assert second.exit_codes == [0]
    with tinsmith.Client() as client:
        assert resolve_settings().address == first.address
        assert [model.base_model for model in client.list_models()] == ["tiny"]

    first.kill()
    with pytest.raises(tinsmith.ConfigurationError, match=f"--data-dir {first.data_dir}"):
        tinsmith.Client()
