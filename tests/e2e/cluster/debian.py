"""Packages of Debian for a folder of our own: nothing is installed, /etc/apt is only read."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_COMMAND_TIMEOUT_S = 600
_APT = Path("/etc/apt")


def why_unusable() -> str:
    """Say why no package can be had here; empty if they can."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        return "this is no Debian"
    if os.geteuid() != 0:
        return "not root"
    try:
        find_mirror()
    except LookupError as error:
        return str(error)
    return ""


def find_mirror() -> str:
    """Return the address of the Debian mirror that this machine uses.

    Raises:
        LookupError: If its sources name none.
    """
    for file in [_APT / "sources.list", *sorted((_APT / "sources.list.d").glob("*"))]:
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                match = re.match(
                    r"(?:URIs:|deb(?:-src)?(?: \[[^]]*\])?)\s+(\S+/debian)/?(\s|$)", line
                )
                if match:
                    return match[1]
    raise LookupError("apt's sources name no Debian mirror")


def say(text: str) -> None:
    """Report progress: a build takes minutes, and pytest shows nothing while a fixture runs."""
    sys.__stderr__.write(f"[test cluster] {text}\n")  # type: ignore[union-attr]
    sys.__stderr__.flush()  # type: ignore[union-attr]


def run(argv: Sequence[str | Path], *, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command to its end and return its standard output.

    Raises:
        RuntimeError: If it fails; with the end of what it wrote.
    """
    done = subprocess.run(
        [str(part) for part in argv],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{argv[0]} {argv[1]} failed with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return done.stdout


class Packages:
    """The packages of one suite, with an apt configuration of their own.

    Args:
        folder: Keeps package lists and downloads.
        suite: Such as `bookworm`.
    """

    def __init__(self, folder: Path, suite: str) -> None:
        self._folder = folder
        for name in ("lists/partial", "cache/archives/partial", "state"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "state/status").touch()
        mirror = find_mirror()
        (folder / "sources.list").write_text(
            "".join(f"{kind} {mirror} {suite} main\n" for kind in ("deb", "deb-src"))
        )
        config = folder / "apt.conf"
        config.write_text(
            f'Dir::Etc::sourcelist "{folder}/sources.list";\n'
            'Dir::Etc::sourceparts "-";\n'
            f'Dir::State::lists "{folder}/lists";\n'
            f'Dir::State::status "{folder}/state/status";\n'
            f'Dir::Cache "{folder}/cache";\n'
            'APT::Sandbox::User "root";\n'
            'Acquire::Languages "none";\n'
        )
        self._env = {**os.environ, "APT_CONFIG": str(config), "DEBIAN_FRONTEND": "noninteractive"}
        say(f"reading the package lists of {suite}")
        run(["apt-get", "update", "-q"], cwd=folder, env=self._env)

    def dependencies(self, name: str) -> list[str]:
        """Return a package and what it depends on, directly or not."""
        only = ["--important", "--no-conflicts", "--no-breaks", "--no-replaces"]
        argv = ["apt-cache", "depends", "--recurse", *only, name]
        lines = run(argv, cwd=self._folder, env=self._env).splitlines()
        # Names at the margin are packages; `<name>` is virtual, others' packages provide it.
        return sorted({line for line in lines if line[0] not in " <|"})

    def unpack(self, names: Sequence[str], root: Path) -> None:
        """Download packages, without what they depend on, and unpack them into a folder."""
        downloads = self._folder / "debs"
        downloads.mkdir(exist_ok=True)
        say(f"downloading {' '.join(names) if len(names) < 8 else f'{len(names)} packages'}")
        run(["apt-get", "download", *names], cwd=downloads, env=self._env)
        for package in sorted(downloads.glob("*.deb")):
            run(["dpkg", "-x", package, root], cwd=self._folder)
            package.unlink()

    def unpack_source(self, name: str, version: str, root: Path) -> None:
        """Download a source package and unpack its upstream archive, without Debian's patches."""
        say(f"downloading the source package {name}")
        downloads = self._folder / "source"
        downloads.mkdir(exist_ok=True)
        run(
            ["apt-get", "source", "--download-only", f"{name}={version}" if version else name],
            cwd=downloads,
            env=self._env,
        )
        root.mkdir(parents=True, exist_ok=True)
        (archive,) = downloads.glob("*.orig.tar.*")
        run(["tar", "xf", archive, "-C", root, "--strip-components=1"], cwd=downloads)
        shutil.rmtree(downloads)
