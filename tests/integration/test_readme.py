"""The loop of the README runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.integration.servers import Deployment

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_loop_of_the_readme_runs(
    embedded: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    monkeypatch.setenv("TINSMITH_ADDRESS", embedded.address)
    monkeypatch.setenv("TINSMITH_API_KEY", embedded.api_key)
    exec(compile(blocks[0], str(README), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split() for line in lines[:10]]
    assert [int(version) for _, version in steps] == list(range(1, 11))
    assert float(steps[-1][0]) < float(steps[0][0])
    assert "10" in lines[-1]


def test_the_two_commands_are_shown() -> None:
    text = README.read_text(encoding="utf-8")
    assert "make demo" in text
    assert "make test" in text
