"""What the main program of every pod does when it cannot start."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.pod import main
from tinsmith_runtime.pod.main import run_pod


@dataclass(frozen=True)
class Settings:
    port: int = 1


async def _refuse(settings: Settings) -> None:
    raise ConfigError("the port is taken; choose another")


@pytest.fixture(autouse=True)
def kept_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pod configures the root logger; the tests after this one want theirs."""
    monkeypatch.setattr(sys, "argv", ["pod"])
    # What a process gives up it never gets back.
    monkeypatch.setattr(main, "IS_LINUX", False)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level


def test_a_pod_that_can_not_start_says_why_where_its_cluster_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "termination-log"
    monkeypatch.setenv("TINSMITH_TERMINATION_LOG", str(path))

    assert run_pod("scheduler", Settings, _refuse) == 2
    assert path.read_text() == "the port is taken; choose another"


async def _break(settings: Settings) -> None:
    raise ValueError("a bug,\nfor instance \ud800" + " and so on" * 1000)


def test_a_pod_that_breaks_says_so_in_one_line_beside_the_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "termination-log"
    monkeypatch.setenv("TINSMITH_TERMINATION_LOG", str(path))

    with pytest.raises(ValueError, match="a bug"):
        run_pod("scheduler", Settings, _break)
    said = path.read_text()
    assert said.startswith("ValueError: a bug, for instance ? and so on")
    assert len(said) == 1000


def test_a_termination_log_that_can_not_be_written_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINSMITH_TERMINATION_LOG", str(tmp_path / "no" / "folder"))

    assert run_pod("scheduler", Settings, _refuse) == 2
    assert "the port is taken" in capfd.readouterr().err


_ABORTS = """
import os
from dataclasses import dataclass
from tinsmith_runtime.pod import main
from tinsmith_runtime.pod.main import run_pod

@dataclass(frozen=True)
class Settings:
    port: int = 1

async def compute(settings):
    os.abort()

run_pod("trainer", Settings, compute)
"""


def test_a_pod_that_native_code_aborts_leaves_its_stacks() -> None:
    command = [sys.executable, "-c", _ABORTS]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert "in compute" in done.stderr


_POD = """
import asyncio, os, sys
from dataclasses import dataclass
from pathlib import Path
from tinsmith_runtime.pod.main import run_pod
from tinsmith_runtime.process_control import prctl

@dataclass(frozen=True)
class Settings:
    port: int = 1

async def serve(settings):
    print(os.stat("/proc/self/environ").st_uid)
    print([line for line in open("/proc/self/status") if line.startswith("NoNewPrivs")])

if os.getuid() == 0:
    os.setuid(65534)
    # A process that changed its user is hidden by the kernel.
    prctl(4, 1)
sys.exit(run_pod(sys.argv.pop(), Settings, serve))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
@pytest.mark.parametrize(("pod", "owner"), [("gateway", 0), ("sampler", os.getuid() or 65534)])
def test_others_of_its_user_do_not_see_the_variables_of_a_pod(pod: str, owner: int) -> None:
    """What is hidden belongs to root; trainers and samplers open each other's memory."""
    ended = subprocess.run(
        [sys.executable, "-c", _POD, pod], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == f"{owner}\n['NoNewPrivs:\\t1\\n']\n"
