"""The tables of tiers: each line decides about a test, and the longest line decides."""

from datetime import date
from pathlib import Path

import pytest
from tests.conftest import UNUSED_LINES
from tests.tiers import MAX_QUARANTINED, Quarantined, Tiers, read_tiers

FLAKY = Quarantined(
    node="tests/unit/test_a.py::test_b",
    owner="engine",
    since=date(2026, 1, 1),
    until=date(2026, 2, 1),
    seen="1 of 3 runs",
    suspicion="a race",
)
TABLES = Tiers(
    {
        "tests/unit/test_a.py": "heavy",
        "tests/unit/test_a.py::test_b": "processes",
        "tests/unit/test_a.py::test_c[1]": "gate",
        "tests/contract/test_e.py::*[b": "heavy",
    },
    (),
)


@pytest.mark.parametrize(
    ("node", "tier"),
    [
        ("tests/unit/test_a.py::test_a", "heavy"),
        ("tests/unit/test_a.py::test_b[x]", "processes"),
        ("tests/unit/test_a.py::test_c[1]", "gate"),
        ("tests/unit/test_a.py::test_c[2]", "heavy"),
        ("tests/contract/test_d.py::test_a", "gate"),
        ("tests/contract/test_e.py::test_a[a]", "gate"),
        ("tests/contract/test_e.py::test_a[b-1]", "heavy"),
        ("tests/e2e/test_d.py::test_a", None),
    ],
)
def test_the_longest_line_decides(node: str, tier: str | None) -> None:
    assert TABLES.tier_of(node) == tier


def test_quarantine_decides_before_any_tier() -> None:
    tables = Tiers({"tests/unit/test_a.py::test_b[x]": "gate"}, (FLAKY,))
    assert tables.tier_of("tests/unit/test_a.py::test_b[x]") == "quarantine"
    assert tables.tier_of("tests/unit/test_a.py::test_c") == "gate"


def test_lines_that_decide_about_nothing_are_found() -> None:
    assert TABLES.unused_lines(["tests/unit/test_a.py::test_b"]) == [
        "tests/unit/test_a.py",
        "tests/unit/test_a.py::test_c[1]",
    ]
    assert TABLES.unused_lines(["tests/unit/test_z.py::test_b"]) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [('slow = ["a"]', "there is no tier slow"), ('gate = ["a"]\nheavy = ["a"]', "stands in gate")],
)
def test_tables_that_contradict_themselves_are_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "tiers.toml").write_text(text)
    (tmp_path / "quarantine.toml").write_text("")
    with pytest.raises(ValueError, match=problem):
        read_tiers(tmp_path)


def test_each_line_of_the_tables_decides_about_a_test(pytestconfig: pytest.Config) -> None:
    """Of the files that this run collected; lines of other files name files that are there."""
    tables = read_tiers()
    assert pytestconfig.stash[UNUSED_LINES] == []
    lines = [*tables.lines, *(entry.node for entry in tables.quarantined)]
    paths = {line.partition("::")[0] for line in lines}
    assert [path for path in paths if not Path(pytestconfig.rootpath, path).exists()] == []


def test_the_quarantine_is_small_and_says_why() -> None:
    entries = read_tiers().quarantined
    assert len(entries) <= MAX_QUARANTINED
    for entry in entries:
        assert all((entry.owner, entry.seen, entry.suspicion)), entry.node
        assert entry.since < entry.until, entry.node
