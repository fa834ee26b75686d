"""Many jobs of three projects at once: none gets what another has, and all end.

That GPU time follows the weights is shown by `test_assignment_simulation.py`, in simulated time.

`TINSMITH_E2E_JOBS` and `TINSMITH_E2E_NODES` set the size; 200 and 50 are the long one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.cluster import TestCluster
from tests.e2e.crowd import run_crowd

_NUM_JOBS = int(os.environ.get("TINSMITH_E2E_JOBS", "60"))
_NUM_NODES = int(os.environ.get("TINSMITH_E2E_NODES", "12"))
_TIMEOUT_S = 30.0 + _NUM_JOBS


@pytest.mark.timeout(_TIMEOUT_S + 120)
def test_a_crowd_of_jobs_shares_the_cluster(resources: TestCluster, tmp_path: Path) -> None:
    outcome = run_crowd(
        resources,
        tmp_path,
        num_jobs=_NUM_JOBS,
        num_nodes=_NUM_NODES,
        seed=1,
        timeout_s=_TIMEOUT_S,
    )

    assert not outcome.history.violations()
    assert "by a bug" not in outcome.log
