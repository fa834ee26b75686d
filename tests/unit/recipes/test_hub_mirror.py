"""Data sets of a hub, loaded from a mirror by the real `datasets` as a driver's pod does it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.fakes.hub import HubMirror, running_hub, write_dataset

_LOAD = """
import json, sys
from tinsmith.errors import TinsmithError
from tinsmith.recipes.tasks.public_data import read_rows
try:
    rows = read_rows(sys.argv[1])
    print(json.dumps({part: [dict(row) for row in found] for part, found in rows.items()}))
except TinsmithError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def load(mirror: HubMirror, data: str, home: Path) -> object:
    environment = {
        "HF_ENDPOINT": mirror.endpoint,
        "HF_HOME": str(home),
        "PYTHONPATH": ":".join(sys.path),
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, data],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_data_set_of_a_mirror_is_loaded_or_said_to_be_away(tmp_path: Path) -> None:
    named = {"org/sums": write_dataset(tmp_path / "sums")}
    with running_hub({}, named) as mirror:
        data = "hf://org/sums:main?split=train[:4]&question=problem"
        found = load(mirror, data, tmp_path / "home")
        assert found == {
            "train": [{"question": f"{n} + 1 = ?", "answer": f"#### {n + 1}"} for n in range(4)],
            "validation": [{"question": f"{n} + 1 = ?", "answer": f"#### {n + 1}"} for n in (6, 7)],
        }
        assert "org/sums/main/train-00000-of-00001.parquet" in mirror.served
        # What no repeat helps, and what may pass.
        [kind, problem] = load(mirror, "hf://org/other", tmp_path / "home")  # type: ignore[misc]
        assert (kind, "org/other cannot be loaded" in problem) == ("ConfigurationError", True)
        mirror.is_broken = True
        [kind, problem] = load(mirror, "hf://org/sums:main", tmp_path / "new")  # type: ignore[misc]
    assert (kind, "check the network" in problem) == ("UnavailableError", True), problem
