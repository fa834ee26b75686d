"""Programs that a model wrote: what they can reach, and what ends them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest

from tinsmith_environment import SandboxLimits, SandboxUnavailableError, sandbox

MODES = ["bubblewrap", "none"]


@pytest.mark.parametrize("mode", MODES)
def test_code_and_commands_are_run(mode: str) -> None:
    code = "import sys; print(sys.stdin.read()[::-1]); print('e', file=sys.stderr); sys.exit(3)"
    result = sandbox.run(code, stdin="abc", sandbox=mode)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "cba\n", "e\n")
    assert sandbox.run(["echo", "hello"], sandbox=mode).stdout == "hello\n"


def test_a_program_reaches_no_file_process_or_variable_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("canary")
    # Python itself may be below /tmp.
    own = {Path(sys.prefix).parts[2]} if sys.prefix.startswith("/tmp/") else {""}
    monkeypatch.setenv("API_TOKEN", "canary")
    code = (
        "import os\n"
        f"print(os.path.exists({str(tmp_path / 'secret')!r}), os.path.exists('/root/.ssh'))\n"
        "print('canary' in str(os.environ), len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
        "try: open('/usr/written', 'w')\n"
        "except OSError: print('read-only')\n"
        f"open('/tmp/mine', 'w').write('x'); print({{*os.listdir('/tmp')}} - {own!r})\n"
    )
    lines = sandbox.run(code).stdout.splitlines()
    assert lines[0] == "False False"
    assert lines[1] in ("False 1", "False 2")
    assert lines[2:] == ["read-only", "{'mine'}"]


def test_python_may_be_installed_below_tmp() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, symlinks=True)
        program = (
            "from tinsmith_environment import sandbox; print(sandbox.run('print(6 * 7)').stdout)"
        )
        done = subprocess.run(
            [f"{folder}/bin/python", "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout.split() == ["42"], done.stderr


def test_a_program_reaches_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        result = sandbox.run(code)
    assert result.exit_code != 0
    assert "Error" in result.stderr


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("code", "exceeded"),
    [
        ("import time; time.sleep(600)", "timeout"),
        ("while True: print('x' * 1000)", "output"),
        (
            "import os, time\nfor _ in range(60): os.fork() or time.sleep(600)\ntime.sleep(600)",
            "processes",
        ),
    ],
)
def test_limits_end_a_program(mode: str, code: str, exceeded: str) -> None:
    timeout_s = 1.0 if exceeded == "timeout" else 60.0
    limits = SandboxLimits(timeout_s=timeout_s, output_bytes=10_000)
    result = sandbox.run(code, limits=limits, sandbox=mode)
    assert result.exceeded == exceeded
    assert result.exit_code != 0
    assert len(result.stdout) + len(result.stderr) <= 10_000


@pytest.mark.parametrize("mode", MODES)
def test_memory_and_files_are_bounded(mode: str) -> None:
    assert "MemoryError" in sandbox.run("bytearray(2**30)", sandbox=mode).stderr
    limits = SandboxLimits(disk_bytes=2**20)
    code = "open('large', 'wb').write(bytes(2**22))"
    assert sandbox.run(code, limits=limits, sandbox=mode).exit_code != 0


@pytest.mark.parametrize("folder", ["/", "/dev", "/dev/shm", "/run", "/proc", "/tmp"])
def test_no_folder_takes_more_than_the_bound(folder: str) -> None:
    code = (
        "for number in range(8):\n"
        f"    open({folder!r} + f'/part{{number}}', 'wb').write(bytes(2**19))\n"
    )
    result = sandbox.run(code, limits=SandboxLimits(disk_bytes=2**20))
    assert result.exit_code != 0
    assert "Error" in result.stderr


def test_a_program_gets_no_capabilities_by_a_namespace_of_its_own() -> None:
    code = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.unshare(0x10000000), ctypes.get_errno() != 0)\n"
    )
    result = sandbox.run(code)
    assert result.stdout == "-1 True\n", result.stderr


def test_what_a_program_leaves_behind_dies_with_it() -> None:
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    time.sleep(600)\n"
        "print('done', flush=True)\n"
    )
    result = sandbox.run(code, limits=SandboxLimits(timeout_s=60.0))
    assert (result.exit_code, result.stdout, result.exceeded) == (0, "done\n", "")


def test_without_bubblewrap_a_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not sandbox.is_available()
    with pytest.raises(SandboxUnavailableError, match="is not installed"):
        sandbox.run(f"open({str(marker)!r}, 'w')")
    assert not marker.exists()
    sandbox.run(f"open({str(marker)!r}, 'w')", sandbox="none")
    assert marker.exists()


def test_a_kernel_that_refuses_is_told_from_a_program_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailableError, match="No permissions"):
        sandbox.run("print(1)")


def test_other_modes_and_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="must be one of"):
        sandbox.run("print(1)", sandbox="docker")
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        SandboxLimits(timeout_s=0)
