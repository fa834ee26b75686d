"""Builds the control plane from Debian's source package, with Debian's Go. Takes about 4 minutes.

Upstream's `make` wants rsync, jq and a container of its own; what it does beyond `go build` is to
generate one file that the archive lacks: the OpenAPI definitions.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.e2e.cluster.debian import Packages, run, say

SUITE = "bookworm"
UNSTABLE = "sid"
_APIEXTENSIONS = "golang-k8s-apiextensions-apiserver-dev"
_GO = "golang-1.19"
# The version that Kubernetes 1.20 carries iterates over maps as Go did before 1.18, and crashes.
_REFLECT2 = "golang-github-modern-go-reflect2-dev"
_LOCK_TIMEOUT_S = 1800
_GENERATOR = "k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen"
_NOT_OURS = ("/testdata/", "/vendor/", "code-generator", "sample", "gengo")


def build_control_plane(folder: Path, names: Sequence[str], version: str) -> None:
    """Build programs of Kubernetes; they appear in the folder when all of them are done."""
    with locked(folder), _workspace(folder) as work:
        if all((folder / name).exists() for name in names):
            return  # another process built them while we waited for the lock
        start_s = time.monotonic()
        packages = Packages(work / "apt", SUITE)
        packages.unpack([f"{_GO}-go", f"{_GO}-src", _REFLECT2], work / "root")
        packages.unpack_source("kubernetes", "", work / "kubernetes")
        tree = work / "gopath/src/k8s.io/kubernetes"
        tree.parent.mkdir(parents=True)
        (work / "kubernetes").rename(tree)
        vendored = tree / "vendor/github.com/modern-go/reflect2"
        shutil.rmtree(vendored)
        (work / "root/usr/share/gocode/src/github.com/modern-go/reflect2").rename(vendored)
        go = _Go(work, _GO, gopath=work / "gopath", tree=tree)
        _generate_openapi(go)
        for name in names:
            say(f"building {name}")
            go.build(f"k8s.io/kubernetes/cmd/{name}", work / "bin" / name, version)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (work / "bin" / name).rename(folder / name)
        say(f"built the control plane in {time.monotonic() - start_s:.0f} s")


def build_crd_server(target: Path) -> None:
    """Build apiextensions-apiserver of Debian's unstable suite from its library packages."""
    with locked(target), _workspace(target) as work:
        if target.exists():
            return
        start_s = time.monotonic()
        packages = Packages(work / "apt", UNSTABLE)
        compiler = next(
            name.removesuffix("-go")
            for name in packages.dependencies("golang-go")
            if re.fullmatch(r"golang-1\.\d+-go", name)
        )
        libraries = [
            name
            for name in packages.dependencies(_APIEXTENSIONS)
            if name.startswith("golang-") and name.endswith("-dev")
        ]
        packages.unpack([f"{compiler}-go", f"{compiler}-src", *libraries], work / "root")
        gopath = work / "root/usr/share/gocode"
        say("building apiextensions-apiserver")
        go = _Go(work, compiler, gopath=gopath, tree=gopath)
        go.build("k8s.io/apiextensions-apiserver", work / "bin/server")
        target.parent.mkdir(parents=True, exist_ok=True)
        (work / "bin/server").rename(target)
        say(f"built it in {time.monotonic() - start_s:.0f} s")


def fetch_kubectl(target: Path) -> None:
    """Take kubectl out of Debian's package."""
    with locked(target.parent), _workspace(target.parent) as work:
        Packages(work / "apt", SUITE).unpack(["kubernetes-client"], work / "root")
        target.parent.mkdir(parents=True, exist_ok=True)
        (work / "root/usr/bin/kubectl").rename(target)


class _Go:
    """Debian's Go, unpacked and not installed, in GOPATH mode: everything it needs lies there."""

    def __init__(self, work: Path, package: str, *, gopath: Path, tree: Path) -> None:
        root = work / "root/usr/lib" / package.replace("golang", "go")
        self.tree = tree
        self.env = {
            "PATH": f"{root}/bin:{os.environ['PATH']}",
            "HOME": str(work),
            "GOROOT": str(root),
            "GOPATH": str(gopath),
            "GOCACHE": str(work / "gocache"),
            "GO111MODULE": "off",
            "GOTOOLCHAIN": "local",
            "CGO_ENABLED": "0",
        }

    def build(self, package: str, target: Path, version: str = "") -> None:
        flags = ["-s -w", *_version_flags(version)] if version else ["-s -w"]
        argv: list[str | Path] = ["go", "build", "-ldflags", " ".join(flags), "-o", target, package]
        run(argv, cwd=self.tree, env=self.env)


def _version_flags(version: str) -> list[str]:
    """Return what makes `/version` tell the truth; Helm and kubectl act on it."""
    major, minor, _ = version.split(".")
    values = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    packages = ("component-base/version", "client-go/pkg/version")
    return [
        f"-X k8s.io/kubernetes/vendor/k8s.io/{package}.{name}={value}"
        for package in packages
        for name, value in values.items()
    ]


def _generate_openapi(go: _Go) -> None:
    say("generating the OpenAPI definitions")
    generator = go.tree / "openapi-gen"
    go.build(_GENERATOR, generator)
    run(
        [
            generator,
            *("--go-header-file", "hack/boilerplate/boilerplate.generatego.txt"),
            *("-O", "zz_generated.openapi", "-p", "k8s.io/kubernetes/pkg/generated/openapi"),
            *("-r", go.tree / "api-violations", "-i", ",".join(_openapi_packages(go.tree))),
        ],
        cwd=go.tree,
        env=go.env,
    )


def _openapi_packages(tree: Path) -> list[str]:
    """Return the packages which ask for definitions, named as the compiler sees them."""
    found = set()
    for source in ("pkg", "staging/src"):
        for file in (tree / source).rglob("*.go"):
            name = file.relative_to(tree).as_posix()
            if any(part in name for part in _NOT_OURS) or file.name.startswith("zz_generated"):
                continue
            if not name.endswith("_test.go") and "+k8s:openapi-gen=true" in file.read_text():
                package = name.rpartition("/")[0]
                package = package.replace("staging/src/", "vendor/", 1)
                found.add(f"k8s.io/kubernetes/{package}")
    return sorted(found)


@contextlib.contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """Yield a folder beside the target, so that results can be renamed; removed afterwards."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".build-", dir=folder.parent))
    (work / "bin").mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time build into a folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        end_s = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise TimeoutError(f"another process builds into {folder} for ever") from None
                time.sleep(0.5)
        yield
