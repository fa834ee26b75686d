"""The primary of the database is killed under load, and its synchronous standby takes over.

A commit that was acknowledged is on both servers. Pods know both hosts and find the one that takes
writes; clients know nothing of it.
"""

from __future__ import annotations

import collections

from tests.chaos.cluster import Cluster
from tests.chaos.ledger_view import LedgerView
from tests.chaos.report import Findings, Row
from tests.chaos.scenario import POSTGRES_SETTINGS, Setting
from tests.chaos.tenants import Tenant, Tenants, compare, supervised
from tests.fakes.postgres import PostgresServer, new_server

_DATABASE = "tinsmith"
_MIN_FINISHED = 40


def run(setting: Setting) -> Findings:
    """Promote, each time in a deployment of its own."""
    num_promotions = 3 if setting.is_long else 1
    rows: list[Row] = []
    lost_at: list[str] = []
    for number in range(num_promotions):
        rows += _promote(setting, number, lost_at)
    total: collections.Counter[str] = collections.Counter()
    for row in rows:
        total[row.name] += int(row.value or 0)
    notes = [f"{row.name}: {row.note}" for row in rows if row.note]
    return Findings(
        [
            Row(name="promotions", value=len(lost_at), target=num_promotions),
            *(Row(name=name, value=value, target=0) for name, value in total.items()),
        ],
        {"unfinished when the primary died": lost_at, "compared": notes},
    )


def _promote(setting: Setting, number: int, lost_at: list[str]) -> list[Row]:
    primary = new_server(POSTGRES_SETTINGS)
    standby: PostgresServer | None = None
    try:
        url = primary.create_database(_DATABASE)
        standby = primary.make_standby(primary.folder.with_name(f"{primary.folder.name}-standby"))
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        url = url.replace(f"127.0.0.1:{primary.port}", hosts)
        with Cluster(
            setting.folder / f"pods-{number}",
            setting.model_dir,
            database_url=url,
            num_trainers=2,
        ) as cluster:
            setting.say("the pods serve")
            tenants = Tenants(
                cluster,
                [Tenant("reading", supervised, 10 + number), Tenant("writing", supervised, 20)],
            )
            tenants.start()
            try:
                _lose_primary(setting, primary, standby, lost_at)
            finally:
                disturbed = tenants.join()
            setting.say("the tenants have every result; now the calm run")
            calm = tenants.repeat(disturbed)
            view = LedgerView(standby, _DATABASE)
            runs = [training.run for training in disturbed.values()]
            return [*view.check(runs), *compare(calm, disturbed)]
    finally:
        primary.remove()
        if standby is not None:
            standby.remove()


def _lose_primary(
    setting: Setting, primary: PostgresServer, standby: PostgresServer, lost_at: list[str]
) -> None:
    view = LedgerView(primary, _DATABASE)
    view.wait_finished(_MIN_FINISHED)
    primary.kill()
    view = LedgerView(standby, _DATABASE)
    lost_at.append(str(view.unfinished()))
    setting.say(f"the primary is dead; {lost_at[-1]}")
    standby.promote()
    setting.say("the standby takes writes")
    view.wait_finished(view.num_finished() + _MIN_FINISHED)
