"""Two servers of one user: each is found, and neither takes the clients of the other with it."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinsmith
from tinsmith.local_servers import list_servers
from tinsmith.settings import resolve_settings, state_dir

TIMEOUT_S = 180.0


class Up:
    """`tinsmith up` as a process, with the state directory of the tests."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self.data_dir = folder
        self.log = folder.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tinsmith_local", "--port", "0", "--num-threads", "1"),
                    *("--model", f"tiny={model_dir}", "--data-dir", str(folder)),
                ],
                env={**os.environ, "TINSMITH_STATE_DIR": str(state_dir())},
                stdout=log,
                stderr=log,
            )
        self.address = self._wait()

    def _wait(self) -> str:
        deadline_s = time.monotonic() + TIMEOUT_S
        while "Ctrl-C" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.05)
        [mine] = [each for each in list_servers(state_dir()) if each.pid == self.process.pid]
        return mine.address

    def stop(self) -> None:
        """End the process cleanly."""
        self.process.terminate()
        assert self.process.wait(TIMEOUT_S) == 0

    def kill(self) -> None:
        """End the process if it still runs, with no time to clear up."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def servers(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Up, Up]]:
    monkeypatch.setenv("TINSMITH_STATE_DIR", str(tmp_path / "state"))
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("first", "second"):
            made.append(Up(tmp_path / name, model_dir))
            stack.callback(made[-1].kill)
        yield made[0], made[1]


def test_a_second_server_gives_the_clients_back(servers: tuple[Up, Up]) -> None:
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
    with tinsmith.Client() as client:
        assert resolve_settings().address == first.address
        assert [model.base_model for model in client.list_models()] == ["tiny"]

    first.kill()
    with pytest.raises(tinsmith.ConfigurationError, match=f"--data-dir {first.data_dir}"):
        tinsmith.Client()
