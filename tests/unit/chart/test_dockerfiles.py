"""What the Dockerfile says of each image: its base, user, installs, extras and sources."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tomllib

import pytest
from tests.support.dockerfiles import IMAGES, PREFIX, ROOT, Image


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
    assert importlib.util.find_spec(image.module)
    if image.pod == "driver":
        assert image.extras == ["data"]
    else:
        assert image.module == f"tinsmith_{image.pod}"
        assert image.pod in image.extras
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
