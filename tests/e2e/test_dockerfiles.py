"""What the Dockerfile does for each pod, done without a container engine.

Its install lines run here, and the entry point that they make. The light images are installed for
real. Those with torch are not: that their extra is what the other lines need is checked in the
environment of the tests.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.dockerfiles import IMAGES, PREFIX, ROOT, Image, copy_sources

INSTALLED = tuple(os.environ.get("TINSMITH_E2E_IMAGES", "controller").split(","))
"""Images whose lines are run; each takes a minute. `make test-images` runs all without torch."""
_INSTALL_TIMEOUT_S = 600
_RUN_TIMEOUT_S = 120


# A driver takes no options: a job tells it everything in variables.
@pytest.mark.parametrize("pod", [image.pod for image in IMAGES if image.pod != "driver"])
def test_entry_points_say_how_they_are_used(pod: str) -> None:
    assert "--config" in _run([sys.executable, "-m", f"tinsmith_{pod}", "--help"], ROOT)


@pytest.fixture(params=[d for d in IMAGES if d.pod in INSTALLED], ids=lambda d: d.pod)
def installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Image, Path]]:
    """An image's environment, made by its own lines from what it copies."""
    image: Image = request.param
    folder = tmp_path_factory.mktemp(image.pod)
    source, target = folder / "source", folder / Path(PREFIX).name
    for text in image.of("COPY"):
        if "--from" not in text:
            copy_sources(text, source)
    for command in image.installs:
        local = re.sub(r"(?<![\w.])/opt/", f"{target.parent}/", command).replace(
            "python -m venv", f"{sys.executable} -m venv"
        )
        _run(["sh", "-eu", "-c", local], source, image.arguments, timeout_s=_INSTALL_TIMEOUT_S)
    yield image, target
    shutil.rmtree(folder)


@pytest.mark.timeout(1200)
def test_an_image_has_what_its_entry_point_needs_and_no_more(
    installed: tuple[Image, Path], tmp_path: Path
) -> None:
    image, target = installed
    python, entry = (
        str(target / "bin/python"),
        target / image.entry_point[0].removeprefix(f"{PREFIX}/"),
    )
    if image.pod == "driver":
        # It takes no options: a job tells it everything in variables.
        assert "usage" in _run([str(target / "bin/tinsmith"), "--help"], tmp_path).lower()
        _run([python, "-c", f"import {image.module}"], tmp_path)
        assert f"-m {image.module} " in entry.read_text()
    else:
        assert f"tinsmith_{image.pod}" in _run([str(entry), "--help"], tmp_path)
        assert "usage" in _run(
            [python, "-m", "tinsmith_runtime.rpc.health_probe", "--help"], tmp_path
        )
    found = {path.name.partition("-")[0] for path in target.glob("lib/*/site-packages/*.dist-info")}
    assert "torch" not in found
    assert ("kubernetes" in found) is (image.pod in ("controller", "scheduler"))


def _run(
    command: list[str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    *,
    timeout_s: float = _RUN_TIMEOUT_S,
) -> str:
    # What the image would not have: the paths and packages of this process.
    kept = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    if command[0] == sys.executable:
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    index = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, **index, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout
