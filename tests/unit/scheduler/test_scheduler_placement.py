from __future__ import annotations

from typing import Any

import pytest

from tinsmith.names import serving_pool
from tinsmith_scheduler.workers.placement import (
    Chosen,
    SamplerCandidate,
    TrainerCandidate,
    Wait,
    WaitReason,
    choose_trainer,
    choose_worker,
    eligible_samplers,
)


def trainer(
    name: str,
    num_runs: int = 0,
    *,
    max_runs: int = 4,
    alive: bool = True,
    model: str = "m",
    pool: str = "",
) -> TrainerCandidate:
    return TrainerCandidate(name, frozenset({model}), alive, num_runs, max_runs, pool=pool)


@pytest.mark.parametrize(
    ("candidates", "options", "expected"),
    [
        pytest.param([trainer("a", 2), trainer("b", 1)], {}, "b", id="fewest-runs"),
        pytest.param([trainer("b", 1), trainer("a", 1)], {}, "a", id="tie-by-name"),
        pytest.param([trainer("a", 4), trainer("b", 3)], {}, "b", id="only-one-has-room"),
        pytest.param([trainer("a", alive=False), trainer("b", 3)], {}, "b", id="dead-one"),
        pytest.param([trainer("a", model="x"), trainer("b", 3)], {}, "b", id="other-model"),
        pytest.param([trainer("a", 0), trainer("b", 3)], {"current": "b"}, "b", id="keeps-current"),
        pytest.param([trainer("a", 4)], {"current": "a"}, "a", id="current-counts-itself"),
        pytest.param(
            [trainer("a"), trainer("b", alive=False)], {"current": "b"}, "a", id="current-died"
        ),
        pytest.param([trainer("a", 0), trainer("b", 3)], {"refused": {"a"}}, "b", id="refused"),
        pytest.param([], {}, WaitReason.NO_TRAINER, id="none"),
        pytest.param([trainer("a", model="x")], {}, WaitReason.NO_TRAINER, id="none-of-model"),
        pytest.param([trainer("a", alive=False)], {}, WaitReason.NO_TRAINER, id="all-dead"),
        pytest.param([trainer("a", 4), trainer("b", 9)], {}, WaitReason.FULL, id="all-full"),
        pytest.param([trainer("a")], {"refused": {"a"}}, WaitReason.FULL, id="all-refused"),
        pytest.param(
            [trainer("a"), trainer("b", 3, pool="p")], {"pool": "p"}, "b", id="own-pool-only"
        ),
        pytest.param(
            [trainer("a", pool="p"), trainer("b", 3)], {}, "b", id="no-pool-no-pooled-trainer"
        ),
        pytest.param(
            [trainer("a"), trainer("b", pool="q")],
            {"pool": "p", "current": "b"},
            WaitReason.NO_TRAINER,
            id="pool-is-empty",
        ),
    ],
)
def test_choose_trainer(
    candidates: list[TrainerCandidate], options: dict[str, Any], expected: str | WaitReason
) -> None:
    choice = choose_trainer("m", candidates, **options)
    if isinstance(expected, str):
        assert choice == Chosen(expected)
    else:
        assert isinstance(choice, Wait)
        assert choice.reason is expected
        assert "base model m" in choice.message


def test_the_worker_of_a_caller_stays_unless_it_dies() -> None:
    samplers = {"a", "b", "c"}
    sessions = [f"projects/p/samplingSessions/{number}" for number in range(300)]
    before = {session: choose_worker(session, samplers) for session in sessions}
    after = {session: choose_worker(session, samplers - {"b"}) for session in sessions}
    assert set(before.values()) == samplers
    assert all(after[session] == name for session, name in before.items() if name != "b")


SHARED, POOLED = SamplerCandidate("shared"), SamplerCandidate("pooled", pool="pool")
ON_C = SamplerCandidate("on-c", pool=serving_pool("p"), project="p", checkpoint="c")
ON_BASE = SamplerCandidate("on-base", pool=serving_pool("p"), project="p")


@pytest.mark.parametrize(
    ("session", "expected"),
    [
        pytest.param({"project": "p"}, ["on-base"], id="base-model"),
        pytest.param({"project": "p", "checkpoint": "c"}, ["on-c"], id="its-checkpoint"),
        pytest.param({"project": "p", "checkpoint": "d"}, ["shared"], id="other-checkpoint"),
        pytest.param({"project": "p", "run": "r"}, ["shared"], id="live-run"),
        pytest.param({"project": "q", "checkpoint": "c"}, ["shared"], id="other-project"),
        pytest.param({"project": "p", "pool": "pool"}, ["pooled"], id="pool"),
        pytest.param({"project": "p", "pool": "gone", "checkpoint": "c"}, [], id="empty-pool"),
    ],
)
def test_samplers_of_a_pool_or_a_checkpoint_are_nobody_elses(
    session: dict[str, str], expected: list[str]
) -> None:
    assert eligible_samplers([SHARED, POOLED, ON_C, ON_BASE], **session) == expected
