"""What the Dockerfile does for each pod, done without a container engine.

Its install lines run here, and the entry point that they make. The light images are installed for
real. Those with torch are not: that their extra is what the other lines need is checked in the
environment of the tests.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.dockerfiles import IMAGES, PREFIX, ROOT, Image, copy_sources

INSTALLED = tuple(os.environ.get("TINSMITH_E2E_IMAGES", "controller").split(","))
"""Images whose lines are run; each takes a minute. `make test-images` runs all without torch."""
_INSTALL_TIMEOUT_S = 600
_RUN_TIMEOUT_S = 120


@pytest.fixture(params=IMAGES, ids=lambda image: image.pod)
def image(request: pytest.FixtureRequest) -> Image:
    assert isinstance(request.param, Image)
    return request.param


def test_every_pod_has_an_image_that_make_knows() -> None:
    names = {image.pod for image in IMAGES}
    pods = {path.parent.parent.name for path in ROOT.glob("services/*/tinsmith_*/config.py")}
    assert names == pods - {"runtime"} | {"driver"}


def test_images_are_built_in_two_stages_on_one_pinned_base(image: Image) -> None:
    assert image.of("FROM") == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"]
    [base] = [text for text in image.of("ARG") if text.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"PYTHON_IMAGE=docker\.io/library/python:3\.11\.\d+-slim-\w+", base)
    assert [
        entry for entry in image.last_stage if entry.word == "RUN" and "pip" in entry.text
    ] == []


def test_images_run_as_nobody_in_particular(image: Image) -> None:
    assert [entry.text for entry in image.last_stage if entry.word == "USER"] == ["65532:65532"]
    assert image.last_stage[-2].word == "USER"


def test_installs_keep_to_the_pinned_versions_and_leave_no_cache(image: Image) -> None:
    assert any("requirements/install.sh" in command for command in image.installs)
    for command in image.installs:
        for install in re.findall(r"pip install [^&]*", command):
            assert "--no-cache-dir" in install
            assert "--require-hashes" in install or install.rstrip().endswith("/wheels/*.whl")
    for command in image.of("RUN"):
        assert "apt-get" not in command or "rm -rf /var/lib/apt/lists/*" in command


def test_extras_exist_and_have_what_the_entry_point_needs(image: Image) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in image.extras:
        assert extra in project["optional-dependencies"]
    assert image.entry_point == [f"{PREFIX}/bin/tinsmith-pod"]
    if image.pod == "driver":
        assert image.extras == []
        assert importlib.util.find_spec(image.module)
    else:
        assert image.module == f"tinsmith_{image.pod}"
        assert image.pod in image.extras
        assert "--config" in _run([sys.executable, "-m", image.module, "--help"], ROOT)
    # Every requirement has a version that the tests have run with.
    for extra in image.extras:
        for requirement in project["optional-dependencies"][extra]:
            name = re.split(r"[\[><=]", requirement)[0]
            assert name == "tinsmith" or importlib.metadata.version(name)


def test_what_is_copied_is_there_and_not_ignored(image: Image) -> None:
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for text in image.of("COPY"):
        if "--from" in text:
            continue
        for source in text.split()[:-1]:
            assert (ROOT / source).exists()
            assert source in kept


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
