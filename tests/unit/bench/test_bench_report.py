from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import report
from bench.report import Row


def test_row_is_the_median_with_the_spread_of_the_repeats() -> None:
    row = Row.of("ratio", [5.6, 5.1, 5.31239], "ratio", "higher", target=5.0)

    assert (row.value, row.spread) == (5.312, (5.1, 5.6))


def test_row_of_one_measurement_has_no_spread() -> None:
    assert Row.of("size", [3.0], "MiB", "lower").spread is None


def test_row_needs_a_measurement() -> None:
    with pytest.raises(ValueError, match="no measurement of ratio"):
        Row.of("ratio", [], "ratio", "higher")


@pytest.mark.parametrize(
    ("value", "better", "target", "is_met"),
    [
        pytest.param(1.0, "higher", 1.0, True, id="higher-reached"),
        pytest.param(0.9, "higher", 1.0, False, id="higher-missed"),
        pytest.param(-3.0, "lower", 10.0, True, id="lower-reached"),
        pytest.param(11.0, "lower", 10.0, False, id="lower-missed"),
        pytest.param(11.0, "lower", None, None, id="no-target"),
    ],
)
def test_target_is_met_in_the_direction_that_is_better(
    value: float, better: report.Better, target: float | None, is_met: bool | None
) -> None:
    row = Row(name="x", value=value, unit="", better=better, target=target)

    assert row.is_met is is_met


def test_results_are_written_in_the_form_that_all_benchmarks_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS_DIR", tmp_path / "results")

    path = report.write("x", [Row.of("a", [1.0, 2.0, 3.0], "ratio", "higher")], {"cores": 2})

    assert path == tmp_path / "results" / "x.json"
    content = json.loads(path.read_text())
    assert content["machine"] == {"cores": 2}
    assert content["rows"] == [
        {
            "name": "a",
            "value": 2.0,
            "unit": "ratio",
            "better": "higher",
            "target": None,
            "spread": [1.0, 3.0],
        }
    ]
