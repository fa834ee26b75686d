"""Each alert rule fires on what it is for; illnesses of runs have a test of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helm.observability.rules import ALERTS

from tests.observability.promtool import fired_alerts
from tests.observability.synthetic_runs import ILLNESSES, OTHER, RUN, Series, Values, healthy

_NUM, _BEGIN = 200, 120
_TRAINER, _SAMPLER = 'instance="trainer-0"', 'instance="sampler-0"'
_STORE = "tinsmith_object_store_request_duration_seconds"


def _from(value: float, before: float = 0) -> Values:
    values = np.full(_NUM, before, dtype=np.float64)
    values[_BEGIN:] = value
    return values


def _rising(by: float = 1) -> Values:
    values = np.zeros(_NUM)
    values[_BEGIN:] = by * np.arange(1, _NUM - _BEGIN + 1)
    return values


def _halted(level: float = 8) -> Values:
    return np.minimum(np.arange(_NUM), _BEGIN) * level


def _histogram(name: str, labels: str, fast: str, slow: str) -> Series:
    """Return buckets of requests that all were fast, and then are slow."""
    return {
        f'{name}_bucket{{{labels},le="{fast}"}}': _halted(),
        f'{name}_bucket{{{labels},le="{slow}"}}': np.arange(_NUM) * 8.0,
        f'{name}_bucket{{{labels},le="+Inf"}}': np.arange(_NUM) * 8.0,
    }


_CASES: dict[str, Callable[[], Series]] = {
    "TinsmithRewardCollapse": lambda: {f"tinsmith_run_reward{{{RUN}}}": _from(0.1, 0.6)},
    "TinsmithKlHigh": lambda: {f'tinsmith_run_kl_nats{{{RUN},estimator="v2"}}': _from(0.03)},
    "TinsmithImportanceTail": lambda: {
        f"tinsmith_run_importance_ratio_tail_fraction{{{RUN}}}": _from(0.2)
    },
    "TinsmithMismatch": lambda: {f"tinsmith_run_mismatch_nats{{{RUN}}}": _from(5)},
    "TinsmithReplayDiverged": lambda: {f"tinsmith_run_replay_diverged{{{RUN}}}": _from(1)},
    "TinsmithPodDown": lambda: {f'up{{job="tinsmith-metrics",{_TRAINER}}}': _from(0, 1)},
    "TinsmithInternalErrors": lambda: {
        f'tinsmith_rpc_duration_seconds_count{{{_TRAINER},method="Sample",code="INTERNAL"}}': (
            _rising()
        )
    },
    "TinsmithTrainerQueueStuck": lambda: {
        f"tinsmith_trainer_queued_operations{{{_TRAINER}}}": _from(3),
        f"tinsmith_trainer_operations_total{{{_TRAINER}}}": _halted(),
    },
    "TinsmithSamplerQueueStuck": lambda: {
        f"tinsmith_sampler_waiting_sequences{{{_SAMPLER}}}": _from(3),
        f'tinsmith_sampler_sequences_total{{{_SAMPLER},stop_reason="stop"}}': _halted(),
    },
    "TinsmithRunsUnplaced": lambda: {"tinsmith_scheduler_waiting_runs": _from(2)},
    "TinsmithEnvironmentFailures": lambda: {
        'tinsmith_environment_failures_total{environment="e",cause="raised"}': _rising(4),
        'tinsmith_environment_reset_duration_seconds_count{environment="e"}': (
            np.arange(_NUM) * 10.0
        ),
    },
    "TinsmithDeadEpisodes": lambda: {
        'tinsmith_coordinator_ended_episodes_total{type="train",state="dead"}': _from(2)
    },
    "TinsmithMatchLimits": lambda: {
        'tinsmith_coordinator_expired_limits_total{limit="barrier"}': _rising()
    },
    "TinsmithLeaseOld": lambda: {f"tinsmith_trainer_lease_age_seconds{{{_TRAINER}}}": _from(12)},
    "TinsmithLedgerSlow": lambda: _histogram(
        "tinsmith_ledger_commit_duration_seconds", _TRAINER, "0.1", "1"
    ),
    "TinsmithLedgerBacklog": lambda: {f"tinsmith_ledger_waiting_writes{{{_TRAINER}}}": _from(500)},
    "TinsmithDiskLow": lambda: {
        f"tinsmith_trainer_data_free_bytes{{{_TRAINER}}}": _from(5, 50),
        f"tinsmith_trainer_data_size_bytes{{{_TRAINER}}}": _from(100, 100),
    },
    "TinsmithObjectStoreErrors": lambda: {
        f'{_STORE}_count{{{_TRAINER},operation="write",outcome="unavailable"}}': _rising()
    },
    "TinsmithObjectStoreSlow": lambda: _histogram(
        _STORE, f'{_TRAINER},operation="write",outcome="ok"', "1", "30"
    ),
    "TinsmithCertificateExpires": lambda: {
        f'tinsmith_certificate_expiry_timestamp_seconds{{{_TRAINER},use="pods"}}': _from(
            86_400, 8_640_000
        )
    },
    "TinsmithKeyExpires": lambda: {
        "tinsmith_scheduler_next_key_expiry_timestamp_seconds": _from(86_400, np.inf)
    },
    "TinsmithEngineRestarts": lambda: {
        f"tinsmith_sampler_engine_restarts_total{{{_SAMPLER}}}": _rising()
    },
    "TinsmithControllerWithoutLeader": lambda: {"tinsmith_controller_is_leader": _from(0, 1)},
    "TinsmithControllerFails": lambda: {
        'tinsmith_controller_reconciles_total{kind="TrainingJob",outcome="failed"}': _rising()
    },
    "TinsmithJobsWait": lambda: {'tinsmith_controller_waiting_jobs{queue="default"}': _from(1)},
}


def test_every_alert_has_a_case() -> None:
    named = {illness.named_by for illness in ILLNESSES.values()}
    assert named | _CASES.keys() == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("name", _CASES)
def test_an_alert_fires_when_it_should_and_not_before(tmp_path: Path, name: str) -> None:
    series = _CASES[name]()

    def fired(last_step: int, num_steps: int) -> set[str]:
        found = fired_alerts(tmp_path, series, last_step=last_step, num_steps=num_steps)
        return {alert.name for alert in found}

    assert name not in fired(_BEGIN - 1, _BEGIN - 1)
    assert name in fired(_NUM - 1, _NUM - _BEGIN)


def test_windows_hold_for_loops_with_slower_steps(tmp_path: Path) -> None:
    """Steps of two minutes: health stays quiet, for two runs and an hour."""
    series = {name: values for name, values in healthy(3, 40).items() if OTHER in name}
    assert fired_alerts(tmp_path, series, last_step=39, num_steps=39, step_s=120) == []
