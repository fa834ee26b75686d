"""Budgets at a pod: what it used since the scheduler last told it counts, once, in any order."""

from __future__ import annotations

import pytest

from tinsmith.v1 import usage_pb2
from tinsmith_runtime.errors import BudgetExceededError, InvalidFieldError, UnavailableError
from tinsmith_runtime.rpc import usage_codec
from tinsmith_runtime.rpc.usage_reporter import UsageReporter
from tinsmith_runtime.usage import (
    Budget,
    BudgetGate,
    Period,
    Quantity,
    UsageAmounts,
    UsageKey,
    UsageReport,
)

TRAINED, SAMPLED, STORED = (
    Quantity.TRAINED_TOKENS,
    Quantity.SAMPLED_TOKENS,
    Quantity.STORED_BYTES,
)
AMOUNTS = UsageAmounts(
    num_trained_tokens=1,
    num_sampled_tokens=2,
    num_prefilled_tokens=3,
    num_cached_tokens=4,
    engine_s=0.5,
)


def budget(
    limit: float, used: float = 0.0, quantity: Quantity = SAMPLED, period: Period = Period.TOTAL
) -> Budget:
    return Budget(project="p", quantity=quantity, limit=limit, period=period, used=used)


def gate_of(*budgets: Budget) -> BudgetGate:
    gate = BudgetGate()
    gate.replace(budgets)
    return gate


def is_refused(gate: BudgetGate, quantity: Quantity = SAMPLED, waiting: float = 0.0) -> bool:
    try:
        gate.require("p", {quantity}, lambda _: waiting)
    except BudgetExceededError:
        return True
    return False


def test_a_budget_is_used_up_at_its_limit() -> None:
    assert not is_refused(gate_of(budget(10, 9.5)))
    assert is_refused(gate_of(budget(10, 10)))
    assert is_refused(gate_of(budget(0)))
    assert not is_refused(gate_of(budget(10, 4)), waiting=5)
    assert is_refused(gate_of(budget(10, 4)), waiting=6)


def test_a_budget_limits_its_own_quantity_and_project() -> None:
    gate = gate_of(budget(0, quantity=TRAINED), budget(5))
    assert is_refused(gate, TRAINED)
    assert not is_refused(gate)
    gate.require("q", set(Quantity))
    gate.require("p", {SAMPLED, STORED})
    # Of several that are used up the same one is named each time.
    both = gate_of(budget(0), budget(0, quantity=TRAINED))
    with pytest.raises(BudgetExceededError, match="trained tokens of a budget"):
        both.require("p", set(Quantity))


def test_what_the_pod_used_itself_counts_until_the_scheduler_counts_it() -> None:
    gate = gate_of(budget(10, 4))
    for _ in range(2):
        assert not is_refused(gate)
        gate.note_spent("p", UsageAmounts(num_sampled_tokens=3))
    assert is_refused(gate)
    # The report is under way: it counts here until the answer, in which it counts.
    gate.begin_report()
    assert is_refused(gate)
    gate.replace([budget(11, 10)])
    assert not is_refused(gate)
    gate.note_spent("p", UsageAmounts(num_sampled_tokens=1))
    assert is_refused(gate)


def test_what_was_used_during_a_report_or_in_one_that_was_lost_counts() -> None:
    gate = gate_of(budget(10))
    gate.note_spent("p", UsageAmounts(num_sampled_tokens=4))
    gate.begin_report()
    gate.note_spent("p", UsageAmounts(num_sampled_tokens=4))
    # The first report was lost; the second one holds both.
    gate.begin_report()
    gate.note_spent("p", UsageAmounts(num_sampled_tokens=2))
    assert is_refused(gate)
    gate.replace([budget(10, 8)])
    assert is_refused(gate)
    gate.replace([budget(11, 8)])
    assert not is_refused(gate)


def test_a_project_without_a_budget_is_never_refused() -> None:
    gate = gate_of(budget(1, 1))
    assert is_refused(gate)
    gate.replace([])
    gate.note_spent("p", AMOUNTS)
    assert not is_refused(gate)


@pytest.mark.parametrize(
    ("period", "words"),
    [
        (Period.TOTAL, "of a budget of 2,000; ask an operator to raise it"),
        (Period.DAY, "of a budget of 2,000 of the day; ask an operator to raise it, or wait"),
        (Period.MONTH, "or wait for the next month"),
    ],
)
def test_a_refusal_says_what_is_used_up_and_until_when(period: Period, words: str) -> None:
    with pytest.raises(BudgetExceededError) as refusal:
        gate_of(budget(2_000, 2_500, period=period)).require("p", {SAMPLED})
    assert "project p has used 2,500 sampled tokens" in refusal.value.message
    assert words in refusal.value.message
    assert "accepted" not in refusal.value.message
    assert ("wait for" in refusal.value.message) is (period is not Period.TOTAL)
    assert refusal.value.metadata == {
        "project": "p",
        "budget": "sampled-tokens",
        "period": period.value,
        "used": "2500",
        "limit": "2000",
    }
    with pytest.raises(BudgetExceededError, match=", and 1,500 more are accepted; "):
        gate_of(budget(2_000, 500)).require("p", {SAMPLED}, lambda _: 1_500)


def test_amounts_are_counted_by_what_a_budget_is_of() -> None:
    assert [AMOUNTS.of(quantity) for quantity in Quantity] == [1, 2, 3, 0.5, 0]
    assert (AMOUNTS + AMOUNTS) - AMOUNTS == AMOUNTS
    joined = AMOUNTS.joined(UsageAmounts(num_trained_tokens=9, engine_s=0.25))
    assert (joined.num_trained_tokens, joined.num_cached_tokens, joined.engine_s) == (9, 4, 0.5)


def test_reports_and_budgets_arrive_as_they_were_sent() -> None:
    key = UsageKey(project="p", run="r", key_id="k", day=7)
    report = UsageReport({key: AMOUNTS}, {("p", "r"): 5, ("p", "s"): 0})
    sent = usage_codec.encode_report("source", report)
    assert (sent.source, usage_codec.decode_report(sent)) == ("source", report)
    for period in Period:
        made = budget(3, 2, TRAINED, period)
        message = usage_codec.encode_budget(made, "projects/p/budgets/trained-tokens")
        # A scheduler that is newer may know of more than this pod does.
        unknown = usage_pb2.Budget(name="projects/p/budgets/unknown")
        assert usage_codec.decode_budgets([unknown, message]) == [made]
    sent.stored[0].num_bytes = -1
    assert usage_codec.decode_report(sent).stored["p", "r"] == 0


@pytest.mark.parametrize(
    "field", [field.name for field in usage_pb2.UsageAmounts.DESCRIPTOR.fields]
)
def test_amounts_below_nothing_are_refused(field: str) -> None:
    message = usage_codec.encode_amounts(AMOUNTS)
    assert usage_codec.decode_amounts(message, "amounts") == AMOUNTS
    setattr(message, field, -1)
    with pytest.raises(InvalidFieldError) as refusal:
        usage_codec.decode_amounts(message, "amounts")
    assert refusal.value.metadata["field"] == "amounts"


class Log:
    """Totals that wait for their report."""

    source = "here"

    def __init__(self, num_rows: int) -> None:
        self.waiting = {
            UsageKey(project="p", run=str(number), key_id="", day=0): AMOUNTS
            for number in range(num_rows)
        }

    async def take(self, limit: int) -> UsageReport:
        return UsageReport(dict(list(self.waiting.items())[:limit]), {})

    async def note_reported(self, report: UsageReport) -> None:
        for key in report.totals:
            del self.waiting[key]


class Scheduler:
    """Takes reports; the first so many are lost."""

    def __init__(self, num_lost: int = 0) -> None:
        self.num_lost = num_lost
        self.sizes: list[int] = []

    async def report_usage(
        self, request: usage_pb2.ReportUsageRequest
    ) -> usage_pb2.ReportUsageResponse:
        assert request.source == "here"
        self.sizes.append(len(request.totals))
        if len(self.sizes) <= self.num_lost:
            raise UnavailableError("the scheduler is away")
        told = usage_pb2.Budget(name="projects/p/budgets/sampled-tokens", limit=1, used=1)
        return usage_pb2.ReportUsageResponse(budgets=[told])


@pytest.mark.parametrize(
    ("num_rows", "num_lost", "sizes"),
    [
        pytest.param(0, 0, [0], id="nothing-new-asks-for-budgets-all-the-same"),
        pytest.param(1_200, 0, [500, 500, 200], id="all-in-parts"),
        pytest.param(3, 1, [3], id="a-scheduler-that-is-away-is-asked-once"),
    ],
)
async def test_all_that_waits_is_reported_at_the_stop(
    num_rows: int, num_lost: int, sizes: list[int]
) -> None:
    log, gate, scheduler = Log(num_rows), BudgetGate(), Scheduler(num_lost)
    reporter = UsageReporter(log, gate, scheduler)  # type: ignore[arg-type]
    reporter.start()
    await reporter.stop()
    assert scheduler.sizes == sizes
    assert bool(log.waiting) is bool(num_lost)
    assert is_refused(gate) is not bool(num_lost)
