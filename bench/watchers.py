"""A server that is watched, and what watches it: a collector of traces, a reader of the page.

Both are processes of their own, `python -m bench.watchers collect` and `... page URL KEY RUN ...`,
so that what they compute is not counted as the server's or the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import grpc
import httpx
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from bench.processes import PipedChild
from tinsmith_local.process import ServerProcess

_SHOWN_TIMEOUT_S = 60.0
_MAX_POINTS = 600
_CURVES_SOURCE = Path(__file__).parents[1] / "clients/web/src/curves.ts"
_OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"


class WatchedServer(ServerProcess):
    """Such a server as a child process.

    Args:
        folder: Its data, state, socket and log go below it.
        model: Directory of the base model.
        collector: Where spans go.
        metrics_address: Where metrics are served.
    """

    def __init__(self, folder: Path, model: Path, *, collector: str, metrics_address: str) -> None:
        socket = str(folder / "switches")
        super().__init__(
            folder,
            {"bench": model},
            module=("bench.watched_server", socket, collector),
            flags=("--metrics-address", metrics_address, "--log-level", "INFO"),
        )
        self._socket = socket
        self._switches: Any = None

    def switch(self, what: str, is_on: bool) -> None:
        """Turn `metrics` (and logs) or `traces` on or off; returns once it is so."""
        if self._switches is None:
            self._switches = Client(self._socket, "AF_UNIX")
        self._switches.send((what, is_on))
        self._switches.recv()


class Collector(PipedChild):
    """Takes spans over OTLP/gRPC, and counts them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(["-m", "bench.watchers", "collect"], folder / "collector.log")
        self.endpoint = ""

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start it, and read where spans are to go."""
        super().start(variables)
        try:
            self.endpoint = f"http://127.0.0.1:{self.read()['port']}"
        except BaseException:
            self.kill()
            raise

    @property
    def num_spans(self) -> int:
        """Spans so far."""
        return int(self.ask("count")["spans"])


class PageReader(PipedChild):
    """The stream of events that the page of runs keeps open, read while it is wanted.

    Args:
        folder: Its log goes here.
        address: `host:port` of the gateway.
        key: Of the reader.
        charts: Ids of the runs whose curves are drawn.
    """

    def __init__(self, folder: Path, address: str, key: str, charts: Sequence[str]) -> None:
        url = f"http://{address}/page/api/events"
        command = ["-m", "bench.watchers", "page", url, key, *charts]
        super().__init__(command, folder / "page.log")
        self.num_events = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Have the page open, from when it has shown everything once."""
        self.ask("open")
        try:
            yield
        finally:
            self.num_events += int(self.ask("close")["events"])


def scrape(metrics_address: str) -> int:
    """Read metrics as Prometheus does, exemplars included; return how many lines there are."""
    answer = httpx.get(f"http://{metrics_address}/metrics", headers={"accept": _OPEN_METRICS})
    answer.raise_for_status()
    return len(answer.text.splitlines())


def overview_names() -> list[str]:
    """Return the metrics that the page of runs asks for, as its source lists them."""
    lists = re.findall(r"names: \[(.*?)\]", _CURVES_SOURCE.read_text(encoding="utf-8"))
    names = [name for found in lists for name in re.findall(r'"([^"]+)"', found)]
    if not names:
        raise RuntimeError(f"{_CURVES_SOURCE} lists no metrics")
    return names


def _say(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class _Spans(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        del context
        num_spans = sum(
            len(scope.spans) for each in request.resource_spans for scope in each.scope_spans
        )
        with self._lock:
            self.count += num_spans
        return trace_service_pb2.ExportTraceServiceResponse()


def _collect() -> None:
    taken = _Spans()
    server = grpc.server(ThreadPoolExecutor(2))
    add_servicer: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_servicer(taken, server)
    _say(port=server.add_insecure_port("127.0.0.1:0"))
    server.start()
    for _ in sys.stdin:
        _say(spans=taken.count)
    server.stop(None)


class _Page:
    """One stream after the other; counts events, and knows when all was shown once."""

    def __init__(self, url: str, key: str, charts: Sequence[str]) -> None:
        names = overview_names()
        self._parameters: list[tuple[str, str | int | float | bool | None]] = [
            ("topic", "runs"),
            ("max_points", _MAX_POINTS),
        ]
        self._parameters += [(kind, name) for name in names for kind in ("summary", "name")]
        self._parameters += [("chart", f"{run}:0:0") for run in charts]
        self._url, self._key, self._charts = url, key, charts
        self.num_events = 0

    async def read(self, is_shown: asyncio.Event) -> None:
        """Read until it is cancelled."""
        missing = {"runs", *self._charts}
        headers = {"authorization": f"Bearer {self._key}"}
        parameters = httpx.QueryParams(self._parameters)
        async with (
            httpx.AsyncClient(timeout=None) as http,
            http.stream("GET", self._url, params=parameters, headers=headers) as answer,
        ):
            answer.raise_for_status()
            kind = ""
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    self.num_events += bool(is_shown.is_set())
                    missing.discard(event["run"] if kind == "curves" else kind)
                    if not missing:
                        is_shown.set()


async def _read_page(page: _Page) -> None:
    while await asyncio.to_thread(sys.stdin.readline):
        is_shown, before = asyncio.Event(), page.num_events
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(page.read(is_shown))
            async with asyncio.timeout(_SHOWN_TIMEOUT_S):
                await is_shown.wait()
            _say(is_open=True)
            await asyncio.to_thread(sys.stdin.readline)
            reading.cancel()
        _say(events=page.num_events - before)


if __name__ == "__main__":
    if sys.argv[1] == "collect":
        _collect()
    else:
        asyncio.run(_read_page(_Page(sys.argv[2], sys.argv[3], sys.argv[4:])))
