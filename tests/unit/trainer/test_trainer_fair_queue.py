"""What the fair queue promises: order, shares, and a bound on every wait; on numbers alone."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith_runtime.fairness.deficit_round_robin import Backlog, CycleShare, FairQueue

CYCLE = 100


def project_of(run: str) -> str:
    return run[0]


@dataclass
class Simulation:
    """Runs with queues of costs; a run named `b2` belongs to project `b`.

    Every cycle is committed before the next one is made. `horizon` is how many parts of a run may
    go into one cycle.
    """

    queues: dict[str, deque[int]]
    horizon: int = 20
    cycle_tokens: int = CYCLE
    alone: frozenset[str] = frozenset()
    served: Counter[str] = field(default_factory=Counter)
    queue: FairQueue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = FairQueue(self.cycle_tokens)

    def backlogs(self) -> list[Backlog]:
        return [
            Backlog(run, project_of(run), list(costs)[: self.horizon], run in self.alone)
            for run, costs in self.queues.items()
            if costs
        ]

    def cycle(self) -> CycleShare:
        turn = self.queue.take(self.backlogs())
        for run, num_parts in turn.num_parts.items():
            for _ in range(num_parts):
                self.served[run] += self.queues[run].popleft()
        return turn


def simulate(costs: Mapping[str, Sequence[int]], **options: object) -> Simulation:
    return Simulation({run: deque(each) for run, each in costs.items()}, **options)  # type: ignore[arg-type]


def share(runs: Sequence[str], run: str) -> int:
    num_runs = Counter(map(project_of, runs))
    return max(1, CYCLE // (len(num_runs) * num_runs[project_of(run)]))


@pytest.mark.parametrize(
    ("costs", "wanted"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({"a": [10, 10, 10]}, [{"a": 3}], id="one-run-takes-all-it-has"),
        pytest.param({"a": [60, 60]}, [{"a": 1}, {"a": 1}], id="an-operation-is-not-cut"),
        pytest.param({"a": [40, 40, 40]}, [{"a": 2}, {"a": 1}], id="a-backlog-is-cut-between-two"),
        pytest.param({"a": [30] * 4, "b": [10]}, [{"a": 3, "b": 1}, {"a": 1}], id="room-is-used"),
        pytest.param(
            {"a": [50], "b": [25], "c": [25]}, [{"a": 1, "b": 1, "c": 1}], id="all-together"
        ),
        pytest.param({"a": [250], "b": [10] * 2}, [{"b": 2}, {"a": 1}], id="large-ones-are-alone"),
        pytest.param(
            {"a": [250] * 2, "b": [10] * 40},
            [{"b": 5}] * 5 + [{"a": 1}] + [{"b": 5}] * 3 + [{"a": 1}],
            id="large-ones-save-up",
        ),
        pytest.param(
            {"a1": [20] * 3, "a2": [20] * 3, "a3": [20] * 3, "b": [20] * 3},
            [
                {"b": 2, "a1": 1, "a2": 1, "a3": 1},
                {"b": 1, "a1": 2, "a2": 1, "a3": 1},
                {"a2": 1, "a3": 1},
            ],
            id="a-project-is-no-more-than-another",
        ),
    ],
)
def test_cycles(costs: dict[str, list[int]], wanted: list[dict[str, int]]) -> None:
    simulation = simulate(costs)
    found = []
    while any(simulation.queues.values()):
        found.append(dict(simulation.cycle().num_parts))
    assert found == wanted


@pytest.mark.parametrize(("cost", "is_alone"), [(CYCLE, False), (CYCLE + 1, True)])
def test_a_part_is_alone_if_no_cycle_holds_it(cost: int, is_alone: bool) -> None:
    assert simulate({"a": [cost]}).cycle() == CycleShare({"a": 1}, is_alone=is_alone)


def test_who_must_be_alone_is_alone_and_not_twice_in_a_row() -> None:
    simulation = simulate({"a": [10], "b": [10], "c": [10] * 8}, alone=frozenset("ab"), horizon=1)
    found = [
        (sorted(turn.num_parts), turn.is_alone) for turn in (simulation.cycle() for _ in range(5))
    ]
    assert found == [(["c"], False), (["a"], True), (["c"], False), (["b"], True), (["c"], False)]


def test_who_is_being_committed_saves_its_share_for_the_next_cycle() -> None:
    """Two cycles take turns: one run of `a` is always in the one that `b` is not in."""
    queue = FairQueue(CYCLE)
    served: Counter[str] = Counter()
    for index in range(20):
        committing = {"b", "a1"} if index % 2 else {"a2"}
        names = ["a1", "a2", "b"]
        turn = queue.take(
            [Backlog(n, project_of(n), [5] * 99, is_ready=n not in committing) for n in names]
        )
        assert not committing & set(turn.num_parts)
        for run, num_parts in turn.num_parts.items():
            served[project_of(run)] += 5 * num_parts
    assert abs(served["a"] - served["b"]) <= CYCLE


@pytest.mark.parametrize("has_work", [True, False])
def test_what_is_saved_is_kept_by_who_has_work_and_lost_by_who_has_not(has_work: bool) -> None:
    small, large = Backlog("b", "b", [50] * 9), Backlog("a", "a", [120])
    queue = FairQueue(CYCLE)
    for _ in range(2):
        assert queue.take([small, large]).num_parts == {"b": 1}
    queue.take([small, large] if has_work else [small])
    assert queue.take([small, large]).is_alone == has_work


RUNS = st.sampled_from(["a1", "a2", "a3", "a4", "b1", "b2", "c1", "d1"])


@given(st.dictionaries(RUNS, st.lists(st.integers(1, 4 * CYCLE), max_size=8), max_size=8))
def test_everything_is_computed_and_no_cycle_is_empty_or_too_large(
    costs: dict[str, list[int]],
) -> None:
    simulation = simulate(costs)
    while any(simulation.queues.values()):
        before = simulation.served.total()
        turn = simulation.cycle()
        num_tokens = simulation.served.total() - before
        assert turn.num_parts
        if turn.is_alone:
            assert list(turn.num_parts.values()) == [1]
        else:
            assert num_tokens <= 4 * CYCLE
    # Nothing was lost or computed twice, and order within a run is that of its queue.
    assert simulation.served == Counter({run: sum(each) for run, each in costs.items() if each})


@given(
    st.dictionaries(RUNS, st.lists(st.integers(1, 6), min_size=1, max_size=40), min_size=1),
    st.dictionaries(RUNS, st.lists(st.integers(1, 4 * CYCLE), min_size=1, max_size=40)),
)
def test_work_within_its_share_waits_for_one_cycle_at_most(
    small: dict[str, list[int]], large: dict[str, list[int]]
) -> None:
    simulation = simulate(large | small)
    num_waited: Counter[str] = Counter()
    while any(simulation.queues.values()):
        ready = [run for run in small if simulation.queues[run]]
        turn = simulation.cycle()
        for run in ready:
            num_waited[run] = num_waited[run] + 1 if run not in turn.num_parts else 0
            assert num_waited[run] <= 1


@given(
    st.integers(1, 3 * CYCLE),
    st.dictionaries(RUNS, st.integers(1, 3 * CYCLE), min_size=1, max_size=7),
)
def test_a_large_operation_is_begun_within_its_bound(cost: int, others: dict[str, int]) -> None:
    """All other runs have work without end, so that nothing is begun for lack of other work."""
    simulation = simulate({"z": [cost], **{run: [each] * 2000 for run, each in others.items()}})
    runs = list(simulation.queues)
    num_large = sum(queue[0] > share(runs, run) for run, queue in simulation.queues.items())
    bound = 2 * (math.ceil(cost / share(runs, "z")) + num_large)
    num_cycles = 0
    while simulation.queues["z"]:
        simulation.cycle()
        num_cycles += 1
        assert num_cycles <= bound


@given(st.dictionaries(RUNS, st.lists(st.integers(1, 4 * CYCLE), max_size=20), max_size=8))
def test_nobody_starves_whatever_it_had_in_advance(costs: dict[str, list[int]]) -> None:
    simulation = simulate(costs)
    shares = {run: share(list(costs), run) for run in costs}
    num_waited: Counter[str] = Counter()
    while any(simulation.queues.values()):
        heads = {run: queue[0] for run, queue in simulation.queues.items() if queue}
        turn = simulation.cycle()
        for run, head in heads.items():
            num_waited[run] = 0 if run in turn.num_parts else num_waited[run] + 1
            # What is owed is less than one operation that fits into a cycle.
            assert num_waited[run] <= 2 * (math.ceil((head + CYCLE) / shares[run]) + len(costs))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 60), st.integers(1, 60))
def test_a_project_with_a_hundred_runs_gets_no_more_than_one_with_one(
    cost_of_many: int, cost_of_one: int
) -> None:
    many = {f"a{index}": [cost_of_many] * 500 for index in range(100)}
    simulation = simulate(
        {**many, "b": [cost_of_one] * 50_000}, horizon=10_000, cycle_tokens=10_000
    )
    for _ in range(8):
        simulation.cycle()
    of_many = sum(served for run, served in simulation.served.items() if run != "b")
    # Each of the hundred may have saved, or owe, nearly one operation.
    assert abs(of_many - simulation.served["b"]) <= 100 * cost_of_many + cost_of_one


@given(st.lists(st.integers(1, CYCLE // 5), min_size=2, max_size=5), st.integers(CYCLE, 500))
def test_a_run_gets_its_share_whatever_others_ask_for(costs: list[int], large: int) -> None:
    runs = {name: [cost] * 4000 for name, cost in zip("abcde", costs, strict=False)}
    simulation = simulate({**runs, "z": [large] * 100}, horizon=1000)
    num_shared = sum(not simulation.cycle().is_alone for _ in range(60))
    for run, costs_of_run in runs.items():
        wanted = num_shared * share(list(simulation.queues), run)
        if costs_of_run[0] <= share(list(simulation.queues), run):
            assert simulation.served[run] >= wanted - costs_of_run[0]
