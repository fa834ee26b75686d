"""The embedded server, with metrics, logs and traces that can be switched while it runs.

`python -m bench.watched_server SOCKET COLLECTOR ...` takes the flags of `tinsmith up` after its
own. There is no setting that turns metrics off, so here `off` puts functions that do nothing in the
place of those that count. Sides of a comparison then share one process, its memory and its data.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Listener
from typing import Any

import typer
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from bench.trace_switch import TraceSwitch
from tinsmith_local.commands import up
from tinsmith_runtime.observability.run_series import RunSeries
from tinsmith_trainer.cycle.step_metrics import StepMetrics


def _ignore(*_: object, **__: object) -> None:
    """Count nothing."""


def _parent(metric: MetricWrapperBase, *_: object, **__: object) -> MetricWrapperBase:
    return metric


def _family(_: RunSeries, family: MetricWrapperBase, *__: object) -> MetricWrapperBase:
    return family


_COUNTING: Mapping[tuple[type[Any], str], Callable[..., Any]] = {
    (MetricWrapperBase, "labels"): _parent,
    (Counter, "inc"): _ignore,
    (Gauge, "inc"): _ignore,
    (Gauge, "dec"): _ignore,
    (Gauge, "set"): _ignore,
    (Histogram, "observe"): _ignore,
    # Series by run, and the curves of each step that the scheduler keeps.
    (RunSeries, "labels"): _family,
    (StepMetrics, "note"): _ignore,
}
"""What metrics are made by, and what stands in its place while they are off."""


class MetricSwitch:
    """Turns metrics and logs of this process on and off."""

    def __init__(self) -> None:
        self._functions = {place: getattr(*place) for place in _COUNTING}

    def set(self, is_on: bool) -> None:
        """Count and log from now on, or do not."""
        for (owner, name), nothing in _COUNTING.items():
            setattr(owner, name, self._functions[owner, name] if is_on else nothing)
        logging.disable(logging.NOTSET if is_on else logging.CRITICAL)


def _obey(socket: str, switches: Mapping[str, MetricSwitch | TraceSwitch]) -> None:
    with Listener(socket, "AF_UNIX") as listener, listener.accept() as connection:
        while True:
            try:
                what, is_on = connection.recv()
            except EOFError:
                return
            switches[what].set(is_on)
            connection.send(None)


def main() -> None:
    """Serve until a signal."""
    socket, collector, *flags = sys.argv[1:]
    # On from the start: what is made while traces are off could not be traced later.
    traces = TraceSwitch(collector)
    traces.set(True)
    switches: dict[str, MetricSwitch | TraceSwitch] = {"metrics": MetricSwitch(), "traces": traces}
    threading.Thread(target=_obey, args=(socket, switches), daemon=True).start()
    sys.argv[1:] = flags
    typer.run(up)


if __name__ == "__main__":
    main()
