"""The record of what was verified: what counts as a failure, and a page that says the same."""

import subprocess
from datetime import date
from pathlib import Path

import pytest
from tests import verification
from tests.junit import Case, read_cases
from tests.verification import Row, add_cases

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite>
<testcase classname="tests.unit.test_verification" name="test_a[x]" time="0.5" />
<testcase classname="tests.unit.test_verification" name="test_b" time="1.5">
<failure message="assert 1 == 2&#10;more">trace</failure></testcase>
<testcase classname="tests.unit.test_verification" name="test_c" time="0">
<skipped type="pytest.skip" message="no GPU">place</skipped></testcase>
<testcase classname="tests.unit.test_verification" name="test_d" time="0">
<error message="failed on setup">trace</error></testcase>
</testsuite></testsuites>
"""
HERE = "tests/unit/test_verification.py"


def row() -> Row:
    return Row(suite="gate", command="make gate", commit="a", date="2026-01-01", machine="m")


def test_a_run_is_read_by_node_id(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(JUNIT)
    assert read_cases(tmp_path / "a.xml") == [
        Case(f"{HERE}::test_a[x]", "passed", 0.5),
        Case(f"{HERE}::test_b", "failed", 1.5, "assert 1 == 2"),
        Case(f"{HERE}::test_c", "skipped", 0.0, "no GPU"),
        Case(f"{HERE}::test_d", "failed", 0.0, "failed on setup"),
    ]


def test_one_run_is_counted_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(JUNIT)
    counted = row()
    counted.return_code = 1
    add_cases(counted, [read_cases(tmp_path / "a.xml")])
    assert (counted.passed, counted.failed, counted.skipped) == (1, 2, {"no GPU": 1})
    assert counted.failures == [
        f"{HERE}::test_b: assert 1 == 2",
        f"{HERE}::test_d: failed on setup",
    ]
    assert not counted.has_passed


@pytest.mark.parametrize(
    ("num_failures", "has_passed"), [(0, True), (1, True), (2, False), (3, False)]
)
def test_of_three_runs_most_decide(num_failures: int, has_passed: bool) -> None:
    runs = [
        [Case("a", "failed" if number < num_failures else "passed", 1.0, "assert")]
        for number in range(3)
    ]
    counted = row()
    counted.return_code = int(num_failures > 0)
    add_cases(counted, runs)
    assert counted.has_passed is has_passed


def test_a_run_that_ends_badly_without_a_failed_test_has_failed() -> None:
    counted = row()
    counted.return_code = 124
    add_cases(counted, [[Case("a", "passed", 1.0)]])
    assert not counted.has_passed
    assert counted.failures == ["make gate ended with 124"]


def test_the_page_says_what_the_record_says() -> None:
    assert verification.PAGE.read_text() == verification.page(verification.read_record())


def test_the_record_is_of_commits_that_this_one_contains() -> None:
    for entry in verification.read_record().values():
        commit = entry.commit.rstrip("+")
        command = [
            "git",
            "-C",
            str(verification.ROOT),
            "merge-base",
            "--is-ancestor",
            commit,
            "HEAD",
        ]
        assert subprocess.run(command, check=False).returncode == 0, entry.suite


def test_a_quarantine_that_lasts_too_long_is_named() -> None:
    assert verification.overdue(date(2000, 1, 1)) == []
    late = verification.overdue(date(2999, 1, 1))
    assert all("was to be understood by" in line for line in late)
