"""Twelve illnesses in synthetic series: the rules name each within 20 steps, and health is quiet.

The series are what `synthetic_runs.py` says of healthy loops, with noise from a seed; the rules run
in promtool as they ship.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observability.promtool import fired_alerts
from tests.observability.synthetic_runs import ILLNESSES, healthy, planted

_BEGIN, _WITHIN = 120, 20


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ILLNESSES)
def test_an_illness_is_named_within_twenty_steps(tmp_path: Path, name: str, seed: int) -> None:
    illness = ILLNESSES[name]
    series = planted(illness, seed, _BEGIN, _BEGIN + _WITHIN + 1)
    found = fired_alerts(tmp_path, series, last_step=_BEGIN + _WITHIN, num_steps=_WITHIN)
    named = [alert for alert in found if alert.name == illness.named_by]
    assert len(named) == 1
    # Only the run that is ill is told of.
    assert {alert.labels.get("run", "ill") for alert in found} == {"ill"}
    assert named[0].labels.get("run") == ("ill" if named[0].labels["team"] == "run" else None)
    before = fired_alerts(tmp_path, series, last_step=_BEGIN - 1, num_steps=_BEGIN - 1)
    assert before == []


@pytest.mark.timeout(240)
def test_a_thousand_healthy_steps_raise_at_most_one_alarm(tmp_path: Path) -> None:
    found = fired_alerts(tmp_path, healthy(0, 1000), last_step=999, num_steps=999)
    assert len(found) <= 1, found
