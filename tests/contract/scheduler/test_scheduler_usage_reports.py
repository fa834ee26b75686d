"""Usage and budgets at the scheduler: what pods report, whose lists show it, what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import timestamp_pb2
from tests.fakes.scheduler_fake_trainer import Metadata, Rig, expect_rpc_error, new_id, running_rig
from tests.support.pod_keys import pod

from tinsmith.v1 import usage_pb2, usage_pb2_grpc
from tinsmith_runtime.usage import DAY_S

Code = grpc.StatusCode
Group = usage_pb2.ListUsageRequest.Group
Period = usage_pb2.Budget.Period
DAY = 20_786
POD = pod("sampler")
RUN = "projects/a/trainingRuns/r"


class UsageRig:
    """A scheduler with what two projects used."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.admin = rig, rig.admin
        self.stub: Any = usage_pb2_grpc.UsageServiceStub(rig.channel)

    async def report(self, **fields: Any) -> usage_pb2.ReportUsageResponse:
        request = usage_pb2.ReportUsageRequest(**{"source": "sampler-0", **fields})
        answer: usage_pb2.ReportUsageResponse = await self.stub.ReportUsage(request, metadata=POD)
        return answer

    async def list(
        self, parent: str = "projects/a", who: Metadata | None = None, **fields: Any
    ) -> list[usage_pb2.UsageRow]:
        """Return the rows of all pages."""
        request = usage_pb2.ListUsageRequest(parent=parent, **fields)
        rows: list[usage_pb2.UsageRow] = []
        while True:
            answer = await self.stub.ListUsage(request, metadata=who or self.admin)
            assert len(answer.rows) <= (request.page_size or 100)
            rows += answer.rows
            request.page_token = answer.next_page_token
            if not request.page_token:
                return rows

    async def budgets(self, parent: str, who: Metadata | None = None) -> Sequence[usage_pb2.Budget]:
        request = usage_pb2.ListBudgetsRequest(parent=parent)
        answer = await self.stub.ListBudgets(request, metadata=who or self.admin)
        found: Sequence[usage_pb2.Budget] = answer.budgets
        return found

    async def set_budget(self, name: str, **fields: Any) -> usage_pb2.Budget:
        fields = {"name": name, "request_id": new_id(), **fields}
        request = usage_pb2.UpdateBudgetRequest(**fields)
        made: usage_pb2.Budget = await self.stub.UpdateBudget(request, metadata=self.admin)
        return made


def sampled(
    num_tokens: int, *, project: str = "a", run: str = RUN, key_id: str = "k", day: int = DAY
) -> usage_pb2.UsageTotal:
    amounts = usage_pb2.UsageAmounts(
        num_trained_tokens=1,
        num_sampled_tokens=num_tokens,
        num_prefilled_tokens=2,
        num_cached_tokens=3,
        engine_seconds=0.5,
    )
    return usage_pb2.UsageTotal(project=project, run=run, key_id=key_id, day=day, amounts=amounts)


def start_of(day: float) -> timestamp_pb2.Timestamp:
    return timestamp_pb2.Timestamp(seconds=int(day * DAY_S))


@pytest.fixture
async def usage(tmp_path: Path) -> AsyncIterator[UsageRig]:
    async with running_rig(tmp_path) as rig:
        made = UsageRig(rig)
        await made.report(
            totals=[
                sampled(10),
                sampled(20, day=DAY + 1),
                sampled(40, key_id="l", run=""),
                sampled(80, project="b", run=""),
            ],
            stored=[usage_pb2.StoredBytes(project="a", run=RUN, num_bytes=7)],
        )
        yield made


async def test_a_project_sees_its_own_usage_alone(usage: UsageRig) -> None:
    user, other = await usage.rig.user("a"), await usage.rig.user("b")
    (row,) = await usage.list(who=user)
    amounts = row.amounts
    assert (row.project, row.run, row.key_id) == ("projects/a", "", "")
    assert not row.HasField("day_time")
    assert (amounts.num_sampled_tokens, amounts.num_trained_tokens) == (70, 3)
    assert (amounts.num_prefilled_tokens, amounts.num_cached_tokens) == (6, 9)
    assert (amounts.engine_seconds, row.stored_bytes) == (1.5, 7)
    for parent in ("projects/b", "projects/none"):
        with expect_rpc_error(Code.NOT_FOUND, reason="RESOURCE_NOT_FOUND"):
            await usage.list(parent, user)
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await usage.list("projects/-", user)
    assert [each.amounts.num_sampled_tokens for each in await usage.list("projects/b", other)] == [
        80
    ]


async def test_an_operator_sees_each_project_and_all_of_them(usage: UsageRig) -> None:
    for parent, tokens in (("projects/a", 70), ("projects/b", 80), ("projects/-", 150)):
        (row,) = await usage.list(parent)
        assert row.amounts.num_sampled_tokens == tokens
        assert row.project == ("" if parent == "projects/-" else parent)
    rows = await usage.list("projects/-", group_by=[Group.GROUP_PROJECT])
    found = [(row.project, row.amounts.num_sampled_tokens, row.stored_bytes) for row in rows]
    assert found == [("projects/a", 70, 7), ("projects/b", 80, 0)]


async def test_rows_are_grouped_in_a_fixed_order_over_pages(usage: UsageRig) -> None:
    # The order in which groups are asked for changes nothing.
    for groups in ([1, 2, 3], [3, 2, 1]):
        rows = await usage.list(group_by=groups, page_size=1)
        assert [(row.run, row.key_id, row.day_time.seconds // DAY_S) for row in rows] == [
            ("", "l", DAY),
            (RUN, "k", DAY),
            (RUN, "k", DAY + 1),
        ]
        assert [row.amounts.num_sampled_tokens for row in rows] == [40, 10, 20]
        assert not any(row.stored_bytes for row in rows)
    by_run = await usage.list(group_by=[Group.GROUP_RUN])
    assert [(row.run, row.stored_bytes) for row in by_run] == [("", 0), (RUN, 7)]


async def test_usage_is_asked_for_in_part(usage: UsageRig) -> None:
    """A day of which a part is asked for counts whole."""
    for fields, tokens in (
        ({"run": RUN}, 30),
        ({"key_id": "l"}, 40),
        ({"start_time": start_of(DAY + 1)}, 20),
        ({"start_time": start_of(DAY + 0.5)}, 70),
        ({"end_time": start_of(DAY + 1)}, 50),
        ({"end_time": start_of(DAY + 0.5)}, 50),
        ({"end_time": start_of(DAY)}, 0),
    ):
        (row,) = await usage.list(**fields)
        assert row.amounts.num_sampled_tokens == tokens, fields


async def test_a_question_that_makes_no_sense_is_refused(usage: UsageRig) -> None:
    for fields in ({"group_by": [0]}, {"group_by": [9]}, {"page_size": -1}, {"page_token": "x"}):
        with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD") as found:
            await usage.list(**fields)
        assert found[0].metadata["field"] in fields
    first = usage_pb2.ListUsageRequest(parent="projects/a", group_by=[1, 3], page_size=1)
    token = (await usage.stub.ListUsage(first, metadata=usage.admin)).next_page_token
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await usage.list(page_token=token, group_by=[1])


async def test_a_budget_is_set_told_to_pods_and_removed(usage: UsageRig) -> None:
    name, stored = "projects/a/budgets/sampled-tokens", "projects/a/budgets/stored-bytes"
    made = await usage.set_budget(name, limit=100.5)
    assert (made.name, made.limit, made.period, made.used) == (name, 100.5, Period.PERIOD_TOTAL, 70)
    assert (await usage.set_budget(stored, limit=0)).used == 7
    other = await usage.set_budget(
        "projects/b/budgets/trained-tokens", limit=5, period=Period.PERIOD_MONTH
    )
    assert other.period == Period.PERIOD_MONTH
    # What is new counts at once, in the answer to its report.
    told = (await usage.report(totals=[sampled(11)])).budgets
    assert [(each.name, each.limit, each.used) for each in told] == [
        (name, 100.5, 71),
        (stored, 0, 7),
        (other.name, 5, other.used),
    ]
    user = await usage.rig.user("b")
    assert [each.name for each in await usage.budgets("projects/b", user)] == [other.name]
    assert [each.name for each in await usage.budgets("projects/a")] == [name, stored]
    assert len(await usage.budgets("projects/-")) == 3
    with expect_rpc_error(Code.NOT_FOUND, reason="RESOURCE_NOT_FOUND"):
        await usage.budgets("projects/a", user)
    await usage.rig.restart()
    usage = UsageRig(usage.rig)
    assert [each.used for each in await usage.budgets("projects/a")] == [71, 7]
    request = usage_pb2.DeleteBudgetRequest(name=name)
    for _ in range(2):
        await usage.stub.DeleteBudget(request, metadata=usage.admin)
    assert [each.name for each in (await usage.report()).budgets] == [stored, other.name]


async def test_a_budget_is_set_once_by_a_request_that_is_repeated(usage: UsageRig) -> None:
    name, request_id = "projects/a/budgets/sampled-tokens", new_id()
    await usage.set_budget(name, limit=1, request_id=request_id)
    await usage.set_budget(name, limit=2)
    repeated = await usage.set_budget(name, limit=1, request_id=request_id)
    assert repeated.limit == 1
    assert [each.limit for each in await usage.budgets("projects/a")] == [2]


async def test_a_budget_that_makes_no_sense_is_refused(usage: UsageRig) -> None:
    for budget, field, fields in (
        ("sampled-tokens", "limit", {}),
        ("sampled-tokens", "limit", {"limit": -1}),
        ("sampled-tokens", "limit", {"limit": float("inf")}),
        ("sampled-tokens", "limit", {"limit": float("nan")}),
        ("sampled-tokens", "period", {"limit": 1, "period": 7}),
        ("stored-bytes", "period", {"limit": 1, "period": Period.PERIOD_DAY}),
        ("hope", "name", {"limit": 1}),
    ):
        with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD") as found:
            await usage.set_budget(f"projects/a/budgets/{budget}", **fields)
        assert found[0].metadata["field"] == field
    assert not await usage.budgets("projects/-")


async def test_only_operators_change_budgets(usage: UsageRig) -> None:
    """The admins of a project do not: its limits are what the operators allow it."""
    name, admin = "projects/a/budgets/sampled-tokens", await usage.rig.user("a", "admin")
    await usage.set_budget(name, limit=1)
    update = usage_pb2.UpdateBudgetRequest(name=name, request_id=new_id(), limit=9)
    for call, request in (
        (usage.stub.UpdateBudget, update),
        (usage.stub.DeleteBudget, usage_pb2.DeleteBudgetRequest(name=name)),
    ):
        with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
            await call(request, metadata=admin)
    assert [each.limit for each in await usage.budgets("projects/a", admin)] == [1]


async def test_a_report_that_makes_no_sense_changes_nothing(usage: UsageRig) -> None:
    negative, endless = sampled(-1), sampled(9_999)
    endless.amounts.engine_seconds = float("inf")
    crowd = [sampled(9_999, run=f"r{number}") for number in range(1_001)]
    for field, fields in (
        ("source", {"source": ""}),
        ("totals[0].amounts", {"totals": [negative]}),
        ("totals[1].amounts", {"totals": [sampled(9_999), endless]}),
        ("totals", {"totals": crowd}),
        ("totals", {"stored": [usage_pb2.StoredBytes(project="a")] * 1_001}),
    ):
        with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD") as found:
            await usage.report(**fields)
        assert found[0].metadata["field"] == field
    (row,) = await usage.list()
    assert row.amounts.num_sampled_tokens == 70
    await usage.report(stored=[usage_pb2.StoredBytes(project="a")] * 1_000)
