"""The health of a run as its metrics show it, after each kind of operation."""

from __future__ import annotations

import uuid

import pytest
from tests.support.metrics import metric

from tinsmith_runtime.errors import QueueFullError
from tinsmith_runtime.observability.run_series import RunSeries
from tinsmith_trainer.execution.run_health import RunHealth


class Rig:
    """A run of its own and what its metrics show."""

    def __init__(self) -> None:
        self.health = RunHealth(RunSeries())
        self.id = f"r-{uuid.uuid4()}"
        self.name = f"projects/p/trainingRuns/{self.id}"

    def shows(self, name: str, **labels: str) -> float:
        return metric(f"tinsmith_run_{name}", project="p", run=self.id, **labels)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_batch_shows_its_loss_by_token_and_what_else_was_found(rig: Rig) -> None:
    found = {
        "num_loss_tokens:sum": 8.0,
        "loss:sum": 4.0,
        "entropy:mean": 1.5,
        "kl_v1:mean": 0.25,
        "kl_v2:mean": 0.5,
        "ratio:mean": 1.25,
        "ratio:max": 3.0,
        "ratio_tail_fraction:mean": 0.125,
        "clip_high_fraction:mean": 0.75,
        "clip_low_fraction:mean": 0.0625,
        "mismatch:max": 2.0,
        "zero_advantage_fraction:mean": 0.375,
        "unknown:mean": 9.0,
    }
    for _ in range(2):
        rig.health.note_batch(rig.name, found, num_tokens=20, num_sequences=4)
    assert rig.shows("trained_tokens_total") == 40
    assert (rig.shows("loss"), rig.shows("trained_tokens_per_sequence")) == (0.5, 2.0)
    assert rig.shows("entropy_nats") == 1.5
    assert [rig.shows("kl_nats", estimator=each) for each in ("v1", "v2")] == [0.25, 0.5]
    ratios = [rig.shows("importance_ratio", statistic=each) for each in ("mean", "max")]
    assert ratios == [1.25, 3.0]
    assert rig.shows("importance_ratio_tail_fraction") == 0.125
    assert [rig.shows("clip_fraction", side=each) for each in ("high", "low")] == [0.75, 0.0625]
    assert (rig.shows("mismatch_nats"), rig.shows("zero_advantage_fraction")) == (2.0, 0.375)


def test_a_batch_without_a_trained_token_leaves_the_loss_as_it_was(rig: Rig) -> None:
    found = {"num_loss_tokens:sum": 2.0, "loss:sum": 3.0}
    rig.health.note_batch(rig.name, found, num_tokens=2, num_sequences=1)
    rig.health.note_batch(rig.name, {}, num_tokens=5, num_sequences=0)
    assert (rig.shows("loss"), rig.shows("trained_tokens_per_sequence")) == (1.5, 0.0)
    assert rig.shows("trained_tokens_total") == 7


def test_steps_waits_and_ends_are_counted(rig: Rig) -> None:
    step = {"grad_norm": 0.5, "learning_rate": 1e-4}
    for version in (3, 4):
        rig.health.note_step(rig.name, step, version=version)
        rig.health.note_wait(rig.name, 1.5)
        rig.health.note_end(rig.name, None, engine_s=0.25)
    rig.health.note_end(rig.name, QueueFullError("full"))
    assert (rig.shows("steps_total"), rig.shows("version")) == (2, 4)
    assert (rig.shows("gradient_norm"), rig.shows("learning_rate")) == (0.5, 1e-4)
    assert (rig.shows("queue_wait_seconds_total"), rig.shows("engine_seconds_total")) == (3.0, 0.5)
    assert rig.shows("operations_total", outcome="succeeded") == 2
    assert rig.shows("operations_total", outcome="failed") == 1
    assert rig.shows("failed_operations_total", reason=QueueFullError.reason) == 1
    assert rig.shows("replay_diverged") == 0
    rig.health.note_divergence(rig.name)
    assert rig.shows("replay_diverged") == 1
    rig.health.forget(rig.name)
    assert rig.shows("steps_total") == rig.shows("replay_diverged") == 0
