"""Faults of a machine that are planted, and the finding that names each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.fakes.local_servers import local_server

from tinsmith.doctor.findings import Level
from tinsmith.doctor.machine import check_machine
from tinsmith.local_servers import Announcement

KEY = "tsk_abc_" + "0" * 43
FREE = 100 * 1000**3


def problems(environ: dict[str, str], *, free: int = FREE) -> list[str]:
    """Return what does not work, each with its remedy on the same line."""
    return [
        f"{finding.check}: {finding.text}; {finding.remedy}"
        for finding in check_machine(environ, free_bytes=lambda _: free)
        if finding.level is not Level.GOOD
    ]


def settled(folder: Path, **variables: str) -> dict[str, str]:
    """Return the variables of a machine on which nothing is wrong, with some of them changed."""
    folders = {"TINSMITH_STATE_DIR": str(folder / "state"), "TINSMITH_CACHE_DIR": str(folder / "c")}
    remote = {"TINSMITH_ADDRESS": "gpu1.example.org:7077", "TINSMITH_API_KEY": KEY}
    return folders | remote | variables


def test_a_machine_that_is_set_up_has_no_findings(tmp_path: Path) -> None:
    assert problems(settled(tmp_path)) == []
    no_proxy = {"https_proxy": "http://proxy:3128", "no_proxy": "localhost,.example.org"}
    assert problems(settled(tmp_path, **no_proxy)) == []


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        pytest.param({"TINSMITH_ADRESS": "a:1"}, "did you mean TINSMITH_ADDRESS", id="typo"),
        pytest.param({"TINSMITH_APIKEY": "a"}, "did you mean TINSMITH_API_KEY", id="typo-key"),
        pytest.param({"TINSMITH_API_KEY": "sk-abc"}, "is no key", id="foreign-key"),
        pytest.param({"TINSMITH_API_KEY": f"{KEY}\n"}, "blanks around it", id="blank-key"),
        pytest.param({"TINSMITH_API_KEY": ""}, "no key is set", id="no-key"),
        pytest.param({"TINSMITH_ADDRESS": "gpu1"}, "has no port", id="no-port"),
        pytest.param({"TINSMITH_ADDRESS": "gpu1:99999"}, "has no port", id="wrong-port"),
        pytest.param({"https_proxy": "http://p:1"}, "no_proxy=gpu1.example.org", id="proxy"),
        pytest.param({"TINSMITH_CA_FILE": "/nowhere.pem"}, "no certificate in PEM", id="ca-file"),
    ],
)
def test_a_variable_that_is_wrong_is_named(
    tmp_path: Path, variables: dict[str, str], named: str
) -> None:
    [found] = problems(settled(tmp_path, **variables))
    assert named in found


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    found = problems(settled(tmp_path))
    assert found[0].startswith(f"folders: {tmp_path / 'state'} cannot be written")


def test_no_server_anywhere_is_named_with_the_command_that_starts_one(tmp_path: Path) -> None:
    environ = settled(tmp_path)
    del environ["TINSMITH_ADDRESS"], environ["TINSMITH_API_KEY"]
    assert problems(environ)[0].startswith("server: no server runs here")
    assert "tinsmith up" in problems(environ)[0]


def test_a_server_that_was_killed_is_named(tmp_path: Path) -> None:
    environ = settled(tmp_path)
    del environ["TINSMITH_ADDRESS"], environ["TINSMITH_API_KEY"]
    with Announcement(tmp_path / "state", local_server("127.0.0.1:7077")):
        pass
    left = tmp_path / "state" / "servers" / "1.json"
    with Announcement(tmp_path / "state", local_server("127.0.0.1:7077")):
        [file] = left.parent.glob("*.json")
        text = file.read_text()
    left.write_text(text)
    left.chmod(0o600)
    found = problems(environ)[0]
    assert "was killed" in found
    assert "tinsmith up" in found


def test_a_full_disk_and_an_open_key_file_are_named(tmp_path: Path) -> None:
    environ = settled(tmp_path)
    del environ["TINSMITH_ADDRESS"], environ["TINSMITH_API_KEY"]
    server = local_server("127.0.0.1:7077", data_dir=str(tmp_path))
    with Announcement(tmp_path / "state", server):
        [file] = (tmp_path / "state" / "servers").glob("*.json")
        assert problems(environ) == []
        assert "0.5 GB are free" in problems(environ, free=5 * 10**8)[0]
        os.chmod(file, 0o644)
        assert f"chmod 600 {file}" in problems(environ)[0]
