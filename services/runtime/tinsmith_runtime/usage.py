"""What projects use, and the budgets that end it: values and the gate of a pod.

Whatever counts keeps totals by run, key and day that never sink. A report of them may be lost,
repeated or overtaken: of two totals the larger one counts. A gate knows the budgets as the
scheduler last told them. What its own pod has used since then it adds itself.
"""

from __future__ import annotations

import enum
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields

from tinsmith_runtime.errors import BudgetExceededError

DAY_S = 86_400


def day_of(time_s: float) -> int:
    """Return the day of UTC of a time, counted from 1970-01-01."""
    return int(time_s // DAY_S)


class Quantity(enum.StrEnum):
    """What a budget limits."""

    TRAINED_TOKENS = "trained-tokens"
    SAMPLED_TOKENS = "sampled-tokens"
    PREFILLED_TOKENS = "prefilled-tokens"
    ENGINE_SECONDS = "engine-seconds"
    STORED_BYTES = "stored-bytes"

    @property
    def unit(self) -> str:
        """Of what it is, as people say it."""
        return self.value.replace("-", " ")


class Period(enum.StrEnum):
    """When what was used of a budget begins anew."""

    TOTAL = "total"
    DAY = "day"
    MONTH = "month"


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageAmounts:
    """What was used; see `UsageAmounts` of the contract."""

    num_trained_tokens: int = 0
    num_sampled_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_cached_tokens: int = 0
    engine_s: float = 0.0

    def __add__(self, other: UsageAmounts) -> UsageAmounts:
        return _by_field(self, other, lambda mine, others: mine + others)

    def __sub__(self, other: UsageAmounts) -> UsageAmounts:
        return _by_field(self, other, lambda mine, others: mine - others)

    def joined(self, other: UsageAmounts) -> UsageAmounts:
        """Return the larger one of each field: two reports of one total in one."""
        return _by_field(self, other, max)

    def of(self, quantity: Quantity) -> float:
        """Return what a budget counts of it; stored bytes are not used up."""
        match quantity:
            case Quantity.TRAINED_TOKENS:
                return self.num_trained_tokens
            case Quantity.SAMPLED_TOKENS:
                return self.num_sampled_tokens
            case Quantity.PREFILLED_TOKENS:
                return self.num_prefilled_tokens
            case Quantity.ENGINE_SECONDS:
                return self.engine_s
            case Quantity.STORED_BYTES:
                return 0


NOTHING = UsageAmounts()
AMOUNT_FIELDS = tuple(field.name for field in fields(UsageAmounts))


def _by_field(
    one: UsageAmounts, other: UsageAmounts, combine: Callable[[float, float], float]
) -> UsageAmounts:
    return UsageAmounts(
        **{name: combine(getattr(one, name), getattr(other, name)) for name in AMOUNT_FIELDS}  # type: ignore[arg-type]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageKey:
    """What a total is of.

    Attributes:
        run: Name of the run; empty for none.
        key_id: Whose calls; empty if that is not known.
        day: See `day_of`.
    """

    project: str
    run: str
    key_id: str
    day: int


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Totals that are new, and the bytes that runs have stored now, by project and run."""

    totals: dict[UsageKey, UsageAmounts]
    stored: dict[tuple[str, str], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much of something a project may use in a period, and what it has used of it."""

    project: str
    quantity: Quantity
    limit: float
    period: Period
    used: float = 0.0


class BudgetGate:
    """Refuses what goes beyond a budget; may be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._budgets: dict[str, dict[Quantity, Budget]] = {}
        self._spent: defaultdict[str, UsageAmounts] = defaultdict(UsageAmounts)
        self._reported: dict[str, UsageAmounts] = {}

    def begin_report(self) -> None:
        """Note that what was spent so far is in a report."""
        with self._lock:
            for project, amounts in self._spent.items():
                self._reported[project] = self._reported.get(project, NOTHING) + amounts
            self._spent.clear()

    def replace(self, budgets: Iterable[Budget]) -> None:
        """Take the answer of a report: budgets in which everything reported counts."""
        by_project: dict[str, dict[Quantity, Budget]] = {}
        for budget in budgets:
            by_project.setdefault(budget.project, {})[budget.quantity] = budget
        with self._lock:
            self._budgets = by_project
            self._reported.clear()

    def note_spent(self, project: str, amounts: UsageAmounts) -> None:
        """Count what a project used, until a report tells the scheduler."""
        with self._lock:
            if project in self._budgets:
                self._spent[project] += amounts

    def require(
        self,
        project: str,
        quantities: Collection[Quantity],
        waiting: Callable[[Quantity], float] = lambda _: 0.0,
    ) -> None:
        """Refuse a call of a project that has used up one of its budgets.

        Args:
            project: Whose call it is.
            quantities: What the call would use.
            waiting: How much of something is accepted and not yet used.

        Raises:
            BudgetExceededError: If it has; it says of what, how much, and when it begins anew.
        """
        of_project = self._budgets.get(project)
        if of_project is None:
            return
        # In the order of the enumeration, so that of two the same one is named each time.
        for quantity in Quantity:
            budget = of_project.get(quantity)
            if budget is None or quantity not in quantities:
                continue
            with self._lock:
                since = self._spent[project] + self._reported.get(project, NOTHING)
            used = budget.used + since.of(quantity)
            if used + waiting(quantity) >= budget.limit:
                raise budget_exceeded(budget, used, waiting(quantity))


def budget_exceeded(budget: Budget, used: float, waiting: float) -> BudgetExceededError:
    """Return the error of a call that a budget has no room for."""
    unit = budget.quantity.unit
    begins_anew = {Period.TOTAL: "", Period.DAY: " of the day", Period.MONTH: " of the month"}
    accepted = f", and {waiting:,.6g} more are accepted" if waiting else ""
    return BudgetExceededError(
        f"project {budget.project} has used {used:,.15g} {unit} of a budget of "
        f"{budget.limit:,.15g}{begins_anew[budget.period]}{accepted}; ask an operator to raise it"
        + ("" if budget.period is Period.TOTAL else f", or wait for the next {budget.period}"),
        project=budget.project,
        budget=budget.quantity.value,
        period=budget.period.value,
        used=f"{used:.15g}",
        limit=f"{budget.limit:.15g}",
    )
