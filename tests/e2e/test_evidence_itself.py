"""A failed test keeps its logs and histories, and its report says where."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tests.e2e import evidence
from tests.e2e.cluster import TestCluster
from tests.e2e.history import History


def taken(*names: str) -> History:
    """Return a history in which jobs of some names were written, the last of them first told."""
    history = History(cast(TestCluster, SimpleNamespace(api=None)), ["n"])
    for revision, name in reversed(list(enumerate(names))):
        metadata = {
            "name": name,
            "namespace": "n",
            "uid": f"uid-{name}",
            "generation": 1,
            "resourceVersion": str(revision),
        }
        item = {"metadata": metadata, "spec": {}, "status": {"phase": "Queued"}}
        history.note("workload", "ADDED", item)
    return history


def test_logs_and_histories_are_kept(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    source.mkdir()
    (source / "controller-0.log").write_text("first\nlast\n")
    (source / "scheduler.log").write_text("of the scheduler\n")

    told = evidence.keep("a[b/c]", [source], [taken("one", "two")], root=root)

    folder = root / "a_b_c_"
    assert str(folder) in told
    assert told.endswith("first\nlast")
    assert (folder / "scheduler.log").read_text() == "of the scheduler\n"
    lines = [json.loads(line) for line in (folder / "history-0.jsonl").read_text().splitlines()]
    assert [(line["revision"], line["state"]["name"]) for line in lines] == [(0, "one"), (1, "two")]


def test_the_next_failure_replaces_what_the_last_one_left(tmp_path: Path) -> None:
    evidence.keep("a", [], [taken("one"), taken("two")], root=tmp_path)
    evidence.keep("a", [], [taken("one")], root=tmp_path)

    assert [path.name for path in (tmp_path / "a").iterdir()] == ["history-0.jsonl"]
