"""The registry of failpoints names what the code passes, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import ConfigError

SERVICES = Path(__file__).parents[3] / "services"
PASSING_PATTERN = re.compile(r'failpoints\.passing\(\s*"([^"]+)"')


def test_the_registry_names_exactly_what_the_code_passes() -> None:
    passed = {
        name
        for path in SERVICES.glob("*/tinsmith_*/**/*.py")
        for name in PASSING_PATTERN.findall(path.read_text())
    }
    assert passed == failpoints.NAMES


@pytest.mark.parametrize("text", ["trainer.comit=kill:1", "trainer.commit=stop", "trainer.commit"])
def test_what_would_never_strike_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="failpoint"):
        failpoints.parse(text)
