"""What a long past costs: `python -m bench.history`.

Two embedded servers on PostgreSQL take turns. The database of one is empty; that of the other holds
10,000 training runs with 1,000,000 operations, and 100,000 sessions that ended. The past is made
of copies of one real run, snapshots included, so that each of its runs can be woken. Memory is that
of the process before its first step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import grpc
from rich.console import Console
from tests.fakes.postgres import FAST, PostgresServer, new_server
from tests.support.memory import resident_mib

from bench import report
from bench.durability import Loop, server_of
from bench.machine_load import NoiseMeter, process_cpu_s
from bench.paired_runs import build_model
from tinsmith.v1 import scheduler_pb2, scheduler_pb2_grpc
from tinsmith_local.process import ServerProcess

_SCHEMAS = ("trainer", "scheduler")
_NUM_WOKEN = 20
_NUM_PAGES = 20
_PAGE_SIZE = 100
_STEPS_BY_RUN = 50
_FILL_RUNS = 1000
_SETTLE_TIMEOUT_S = 600.0
_console = Console(highlight=False, stderr=True)

# Of the tables with a row, or several, for each run: the column that names it.
_LEDGER = {"runs": "name", "leases": "run", "operations": "run", "snapshots": "run"}


def main() -> int:
    """Measure and write `bench/results/history.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    postgres = new_server({**FAST, "autovacuum": "on", "shared_buffers": "128MB"})
    try:
        with tempfile.TemporaryDirectory(prefix="tinsmith-history-") as name:
            rows = _measure(postgres, Path(name), arguments)
    finally:
        postgres.remove()
    machine = report.machine() | {"threads": 1}
    report.write("history", rows, machine)
    report.show("A long past", rows, machine)
    return 0


class Side:
    """A server with its database.

    Args:
        postgres: The database server.
        name: Of the database and of the folder.
        folder: Where the server keeps its files.
        model: The base model.
    """

    def __init__(self, postgres: PostgresServer, name: str, folder: Path, model: Path) -> None:
        self.postgres = postgres
        self.database = postgres.create_database().rpartition("/")[2]
        self._place = folder / name
        self._model = model
        self.server: ServerProcess
        self.loop: Loop
        self.start_s = 0.0
        self.memory_mib = 0.0

    def start(self) -> None:
        """Start, and take the time until runs can be listed."""
        url = f'"{self.postgres.url_of(self.database)}"'
        further = {pod: {"database_url": url} for pod in _SCHEMAS}
        begin_s = time.perf_counter()
        self.server = server_of(self._place, self._model, further)
        self.loop = Loop(self.server)
        self.start_s = time.perf_counter() - begin_s

    def settle(self) -> float:
        """Wait until the runs of the process before were adopted; return how long that took."""
        begin_s = time.perf_counter()
        query = "SELECT count(*) FROM scheduler.runs WHERE state = 'moving'"
        while int(self.query(query)):
            if time.perf_counter() - begin_s > _SETTLE_TIMEOUT_S:
                raise RuntimeError("the runs were not adopted")
            time.sleep(0.2)
        self.memory_mib = resident_mib(self.server.pid)
        return time.perf_counter() - begin_s

    def stop(self) -> None:
        """Stop the server; the database stays."""
        self.loop.client.close()
        self.server.stop()

    def query(self, statement: str) -> str:
        """Run a statement in the database."""
        return self.postgres.query(statement, database=self.database)

    def page_ms(self) -> float:
        """Return the median time of a page of the list of runs."""
        token, seconds = "", []
        with grpc.insecure_channel(self.server.address) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            metadata = (("authorization", f"Bearer {self.server.api_key}"),)
            for _ in range(_NUM_PAGES):
                request = scheduler_pb2.ListTrainingRunsRequest(
                    parent="/".join(self.loop.run.name.split("/")[:2]),
                    page_size=_PAGE_SIZE,
                    page_token=token,
                )
                begin_s = time.perf_counter()
                page = stub.ListTrainingRuns(request, metadata=metadata, timeout=60)
                seconds.append(time.perf_counter() - begin_s)
                token = page.next_page_token
        return 1000 * statistics.median(seconds)


def _measure(
    postgres: PostgresServer, folder: Path, arguments: argparse.Namespace
) -> list[report.Row]:
    model = folder / "model"
    build_model(model, with_tokenizer=True)
    empty, full = (Side(postgres, name, folder, model) for name in ("empty", "full"))
    full.start()
    full.loop.minimal_step_ms(_STEPS_BY_RUN)
    template = full.loop.run.name
    full.stop()
    begin_s = time.perf_counter()
    _fill(full, template, arguments.runs, arguments.sessions)
    num_operations = int(full.query("SELECT count(*) FROM ledger.operations"))
    _console.print(f"{num_operations} operations in {time.perf_counter() - begin_s:.0f} s")
    empty.start()
    full.start()
    meter = NoiseMeter(lambda: sum(process_cpu_s(side.server.pid) for side in (empty, full)))
    adopted_s = full.settle()
    empty.settle()
    _console.print(f"adopted in {adopted_s:.1f} s")
    steps: dict[Side, list[float]] = {empty: [], full: []}
    created: dict[Side, list[float]] = {empty: [], full: []}
    for _ in range(arguments.repeats):
        for side in (empty, full):
            steps[side].append(side.loop.minimal_step_ms(arguments.steps))
            begin_s = time.perf_counter()
            side.loop.client.create_lora_training_run("bench", rank=4, seed=1)
            created[side].append(1000 * (time.perf_counter() - begin_s))
    ratios = [later / before for later, before in zip(steps[full], steps[empty], strict=True)]
    _console.print(str(meter.describe()))
    rows = [
        report.Row.of("operations in the ledger", [num_operations], "operations", "higher"),
        report.Row.of("minimal step: ratio", ratios, "x", "lower", target=1.2),
    ]
    for side, name in ((empty, "empty"), (full, "with the past")):
        rows += [
            report.Row.of(f"start, {name}", [side.start_s], "s", "lower"),
            report.Row.of(f"memory, {name}", [side.memory_mib], "MiB", "lower"),
            report.Row.of(f"minimal step, {name}", steps[side], "ms", "lower"),
            report.Row.of(f"new run, {name}", created[side], "ms", "lower"),
        ]
    rows += [
        report.Row.of("runs of the past adopted in", [adopted_s], "s", "lower"),
        report.Row.of("page of 100 runs, with the past", [full.page_ms()], "ms", "lower"),
        report.Row.of("a run of the past wakes", _woken_ms(full, template), "ms", "lower"),
    ]
    for side in (empty, full):
        side.stop()
    return rows


def _woken_ms(side: Side, template: str) -> list[float]:
    """Return how long the first call takes for runs that sleep."""
    durations_ms = []
    for number in range(1, _NUM_WOKEN + 1):
        begin_s = time.perf_counter()
        side.loop.client.runs.get(f"{template}-{number}")
        durations_ms.append(1000 * (time.perf_counter() - begin_s))
    return durations_ms


def _fill(side: Side, template: str, num_runs: int, num_sessions: int) -> None:
    """Copy a run with its operations, and make sessions that ended."""
    project = template.split("/")[1]
    prefix = f"projects/{project}/sessions/past-"
    for begin in range(1, num_runs + 1, _FILL_RUNS):
        end = min(begin + _FILL_RUNS - 1, num_runs)
        for table, column in _LEDGER.items():
            side.query(
                f"INSERT INTO ledger.{table} SELECT (jsonb_populate_record(t, "
                f"jsonb_build_object('{column}', t.{column} || '-' || n))).* "
                f"FROM ledger.{table} t, generate_series({begin}, {end}) n "
                f"WHERE t.{column} = '{template}'"
            )
    side.query(
        "INSERT INTO scheduler.sessions SELECT (jsonb_populate_record(s, jsonb_build_object("
        f"'name', '{prefix}' || n, 'state', 'finished', 'serial', s.serial + n))).* "
        f"FROM scheduler.sessions s, generate_series(1, {num_sessions}) n "
        "WHERE s.serial = (SELECT max(serial) FROM scheduler.sessions)"
    )
    side.query(
        "INSERT INTO scheduler.runs SELECT (jsonb_populate_record(r, jsonb_build_object("
        f"'name', r.name || '-' || n, 'serial', r.serial + n, 'session', '{prefix}' || n))).* "
        f"FROM scheduler.runs r, generate_series(1, {num_runs}) n WHERE r.name = '{template}'"
    )
    side.query(
        "SELECT setval(pg_get_serial_sequence('scheduler.runs', 'serial'), max(serial)) "
        "FROM scheduler.runs"
    )
    side.query("VACUUM ANALYZE")


if __name__ == "__main__":
    raise SystemExit(main())
