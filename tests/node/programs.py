"""The programs of a real node: from Debian's packages, unpacked into the cache, never installed."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import UnavailableError, debian
from tests.e2e.cluster.binaries import VERSION, cache_folder
from tests.e2e.cluster.build import SUITE, build_control_plane, locked

_PACKAGES = (
    "containerd",
    "runc",
    "containernetworking-plugins",
    "libseccomp2",
    "busybox-static",
    "debootstrap",
    "dnsmasq-base",
    "libnetfilter-conntrack3",
    "libnfnetlink0",
    "libnftables1",
    "libnftnl11",
)
_BASE_PACKAGES = ("python3", "python3-venv", "python-is-python3", "ca-certificates")


@dataclass(frozen=True, slots=True)
class Programs:
    """Where they are.

    Attributes:
        kubelet: Built from the sources that the control plane is built from.
        packages: Root folder of what was unpacked.
        base: Archive of a minimal Debian with Python, which images are based on.
    """

    kubelet: Path
    packages: Path
    base: Path

    @property
    def network_plugins(self) -> Path:
        """The folder of the CNI plugins."""
        return self.packages / "usr" / "lib" / "cni"

    @property
    def busybox(self) -> Path:
        """A program without libraries."""
        return self.packages / "bin" / "busybox"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which the unpacked programs run."""
        folders = [self.packages / place for place in ("usr/bin", "usr/sbin")]
        library = self.packages / "usr" / "lib" / f"{os.uname().machine}-linux-gnu"
        path = os.pathsep.join([*map(str, folders), os.environ["PATH"], "/usr/sbin", "/sbin"])
        return {"PATH": path, "LD_LIBRARY_PATH": str(library), "HOME": "/root"}


def why_unusable() -> str:
    """Say why this machine can run no real node; empty if it can."""
    if reason := debian.why_unusable():
        return reason
    tools = ("unshare", "setpriv", "ip", "mount", "chroot")
    if missing := [name for name in tools if not shutil.which(name)]:
        return f"{', '.join(missing)} missing (Debian: util-linux, iproute2, mount, coreutils)"
    if os.uname().machine != "x86_64":
        return "images are made for x86_64 alone"
    if Path(tempfile.gettempdir()).resolve().is_relative_to("/var"):
        return "temporary files are below /var, which is covered: set TMPDIR"
    # Kubernetes 1.20 knows no other version.
    if not Path("/sys/fs/cgroup/memory/tasks").exists():
        return "control groups of version 1 are not mounted at /sys/fs/cgroup"
    return ""


def find_programs() -> Programs:
    """Return the programs; gets and builds, for some minutes, what the cache lacks.

    Raises:
        UnavailableError: If this machine cannot.
    """
    if reason := why_unusable():
        raise UnavailableError(f"no real node here: {reason}")
    folder = cache_folder(VERSION)
    if not (folder / "kubelet").exists():
        build_control_plane(folder, ("kubelet",), VERSION)
    # Another list of packages is another folder.
    packages = folder / f"node-{zlib.crc32(repr(_PACKAGES).encode()):08x}"
    base = folder / f"base-{zlib.crc32(repr(_BASE_PACKAGES).encode()):08x}.tar"
    with locked(packages):
        if not packages.exists():
            _unpack(packages)
        programs = Programs(folder / "kubelet", packages, base)
        if not base.exists():
            _make_base(programs)
    return programs


def _unpack(target: Path) -> None:
    work = target.with_suffix(".new")
    shutil.rmtree(work, ignore_errors=True)
    debian.Packages(work / "apt", SUITE).unpack(_PACKAGES, work / "root")
    (work / "root").rename(target)
    shutil.rmtree(work)


def _make_base(programs: Programs) -> None:
    debian.say("making a minimal Debian with Python")
    root = programs.base.with_suffix(".new")
    shutil.rmtree(root, ignore_errors=True)
    tools = programs.packages / "usr"
    included = f"--include={','.join(_BASE_PACKAGES)}"
    debian.run(
        [
            *("unshare", "--mount", tools / "sbin" / "debootstrap", "--variant=minbase", included),
            *(SUITE, root, debian.find_mirror()),
        ],
        cwd=programs.packages,
        env=programs.environment | {"DEBOOTSTRAP_DIR": str(tools / "share" / "debootstrap")},
    )
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        package.unlink()
    shutil.rmtree(root / "dev")  # what debootstrap made; containers get their own
    (root / "dev").mkdir()
    archive = programs.base.with_suffix(".part")
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(root, ".")
    shutil.rmtree(root)
    archive.rename(programs.base)
