"""Which operation made which step, and from where it can be computed again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith_runtime.errors import StepExpiredError, StepNotFoundError
from tinsmith_runtime.ledger import EndedOperation, RunHistory, RunRecord, SnapshotRecord
from tinsmith_trainer.execution.step_history import StepHistory

RUN = "projects/p/trainingRuns/r"


def history(
    ended: list[EndedOperation],
    *,
    version: int,
    snapshots: dict[int, int] | None = None,
    expired: int = 0,
    payloads: int = 0,
) -> StepHistory:
    """Return the steps of a run whose rows up to a number, and requests up to another, are gone."""
    return StepHistory(
        RunHistory(
            run=RunRecord(name=RUN, base_model="m", adapter="{}", epoch=1, version=version),
            is_here=True,
            expired_through=expired,
            payloads_through=payloads,
            ended=tuple(each for each in ended if each.sequence_number > expired),
            snapshots=tuple(
                SnapshotRecord(
                    run=RUN,
                    sequence_number=number,
                    version=known,
                    folder=f"{number}",
                    sha256="",
                    create_time_s=0.0,
                )
                for number, known in sorted((snapshots or {}).items(), reverse=True)
            ),
        ),
        int,
    )


def step(number: int, *, is_success: bool = True, was_begun: bool = True) -> EndedOperation:
    return EndedOperation(
        sequence_number=number, kind="optim_step", is_success=is_success, was_begun=was_begun
    )


def load(number: int, version: int | None) -> EndedOperation:
    return EndedOperation(
        sequence_number=number,
        kind="load_checkpoint",
        is_success=True,
        was_begun=True,
        result=None if version is None else b"%d" % version,
    )


_KINDS = st.lists(
    st.sampled_from(["step", "step", "failed", "refused", "load", "other"]), min_size=1, max_size=20
)


@given(_KINDS, st.data())
def test_versions_are_those_that_the_run_had(kinds: list[str], data: st.DataObject) -> None:
    ended, versions, version = [], {0: 0}, 0
    for number, kind in enumerate(kinds, 1):
        match kind:
            case "step":
                version += 1
                ended.append(step(number))
                versions[version] = number
            case "failed":
                ended.append(step(number, is_success=False))
            case "refused":
                ended.append(step(number, is_success=False, was_begun=False))
            case "load":
                version = data.draw(st.integers(0, 5))
                ended.append(load(number, version))
                versions[version] = number
    steps = history(ended, version=version)
    for each, number in versions.items():
        origin = steps.find(each)
        assert (origin.through, origin.bases, origin.step) == (number, (None,), each)
        cleared = [e.sequence_number for e in ended if e.is_success or e.was_begun]
        before = [0, *(n for n in cleared if n < number)]
        assert origin.begin == (before[-1] if number else -1)
    with pytest.raises(StepNotFoundError):
        steps.find(max(versions) + 1)


def test_the_nearest_snapshot_comes_first_and_the_beginning_last() -> None:
    ended = [step(number) for number in (2, 4, 6)]
    steps = history(ended, version=3, snapshots={2: 1, 4: 2, 6: 3})
    found = [base and base.sequence_number for base in steps.find(2).bases]
    assert found == [4, 2, None]
    assert [base and base.sequence_number for base in steps.find_rerun(2).bases] == [2, None]


def test_without_its_first_rows_a_run_knows_its_steps_by_a_snapshot() -> None:
    ended = [step(number) for number in range(2, 21, 2)]
    steps = history(ended, version=10, snapshots={12: 6, 18: 9}, expired=8, payloads=10)
    assert [steps.find(each).through for each in (6, 7, 9, 10)] == [12, 14, 18, 20]
    for each in (0, 4, 5):
        with pytest.raises(StepExpiredError, match="it has steps 6 to 10"):
            steps.find(each)
    with pytest.raises(StepNotFoundError, match="it has steps 6 to 10"):
        steps.find(11)


def test_a_snapshot_within_an_accumulation_is_no_step_to_fork_at() -> None:
    steps = history([step(2), step(6)], version=2, snapshots={4: 1}, expired=1, payloads=1)
    assert steps.find(2).through == 6
    with pytest.raises(StepExpiredError):
        steps.find(1)


def test_a_load_whose_result_expired_is_known_by_the_snapshot_that_it_wrote() -> None:
    steps = history([step(2), load(3, None), step(4)], version=8, snapshots={3: 7})
    assert (steps.find(7).through, steps.find(8).through) == (3, 4)
    assert steps.loads_between(0, 4) == [3]
    assert steps.loads_between(3, 4) == []


def test_only_a_trained_step_is_rerun() -> None:
    steps = history([step(2), load(3, 5)], version=5)
    assert steps.find_rerun(1).begin == 0
    for each in (0, 5):
        with pytest.raises(StepNotFoundError, match="was not trained"):
            steps.find_rerun(each)
