"""Statistics by job: what is kept of how many, and percentiles of step times."""

from __future__ import annotations

import datetime

from hypothesis import given
from hypothesis import strategies as st

from tinsmith_environment.instances.statistics import JobStatistics, Statistics, StatisticsKey

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 200)), max_size=2000))
def test_the_number_of_jobs_is_bounded_and_the_last_one_is_kept(
    episodes: list[tuple[int, int]],
) -> None:
    statistics = Statistics(lambda: NOW)
    for project, job in episodes:
        key = StatisticsKey(str(project), str(job), "task")
        entry = statistics.begin(key)
        entry.num_episodes += 1
        assert (key, entry) in statistics.of(key.project)
    kept = [statistics.of(str(project)) for project in range(41)]
    assert all(len(entries) <= 64 for entries in kept)
    assert sum(map(len, kept)) <= 1024


def test_a_full_project_forgets_its_own_jobs_alone() -> None:
    statistics = Statistics(lambda: NOW)
    statistics.begin(StatisticsKey("quiet", "job", "task"))
    for job in range(100):
        statistics.begin(StatisticsKey("busy", str(job), "task"))
    assert len(statistics.of("quiet")) == 1
    assert {key.job for key, _ in statistics.of("busy")} == {str(job) for job in range(36, 100)}


@given(st.lists(st.floats(0, 10), min_size=1, max_size=3000))
def test_percentiles_are_those_of_the_last_steps(times_s: list[float]) -> None:
    entry = JobStatistics(NOW)
    for time_s in times_s:
        entry.add_step(time_s)
    last = sorted(times_s[-2048:])
    assert entry.num_steps == len(times_s)
    assert entry.step_time_s(0.5) == last[len(last) // 2]
    assert entry.step_time_s(1.0) == last[-1]
