"""What `make release` leaves: a wheel, a list of components, digests, a signature that holds."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from tests.support.dockerfiles import ROOT


def _run(command: list[str], folder: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, input=text, capture_output=True, text=True, timeout=300, check=False
    )


_MAKE = ["make", "--assume-old=.venv/bin/.installed"]
"""The environment of the tests serves, though its mark is older than the files of the clone."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    done = _run(["git", "clone", "-q", str(ROOT), str(folder)], tmp_path)
    assert done.returncode == 0, done.stderr
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def test_a_release_can_be_verified(clone: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "release", "-f", str(key)], tmp_path)
    done = _run([*_MAKE, "release", f"SIGNING_KEY={key}"], clone)
    assert done.returncode == 0, done.stdout + done.stderr
    dist = clone / "dist"
    digests = dict(
        reversed(line.split()) for line in (dist / "SHA256SUMS").read_text().splitlines()
    )
    assert digests.keys() >= {"install.yaml", "uv.lock"}
    assert any(name.endswith(".whl") for name in digests)
    for name, digest in digests.items():
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest
    [listed] = dist.glob("*.cdx.json")
    components = {entry["name"] for entry in json.loads(listed.read_text())["components"]}
    assert components >= {"grpcio", "torch", "kubernetes"}
    signers = tmp_path / "signers"
    signers.write_text(f"release {key.with_suffix('.pub').read_text()}")
    verify = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "release"]
    verify += ["-n", "tinsmith-release", "-s", str(dist / "SHA256SUMS.sig")]
    text = (dist / "SHA256SUMS").read_text()
    assert _run(verify, tmp_path, text).returncode == 0
    assert _run(verify, tmp_path, text.replace("a", "b", 1)).returncode != 0


def test_a_release_wants_a_key_and_a_base_by_digest(clone: Path) -> None:
    done = _run([*_MAKE, "release"], clone)
    assert done.returncode != 0
    assert "set SIGNING_KEY" in done.stdout
    refused = _run(
        [*_MAKE, "images", "ENGINE=true", "RELEASE=1", "PYTHON_IMAGE=python:3.11"], clone
    )
    assert refused.returncode != 0
    assert "@sha256" in refused.stdout
