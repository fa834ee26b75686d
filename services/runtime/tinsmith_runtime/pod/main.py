"""What is the same in the main program of every pod: settings, logs, exit codes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tinsmith.errors import ConfigurationError
from tinsmith.tracing import switch
from tinsmith_runtime.config import load_config
from tinsmith_runtime.errors import ConfigError, TinsmithError, sentence_of
from tinsmith_runtime.observability.logs import configure_logging
from tinsmith_runtime.pod.base import Pod
from tinsmith_runtime.pod.settings_help import describe_settings
from tinsmith_runtime.process_control import IS_LINUX, gain_no_privileges, hide
from tinsmith_runtime.rpc.server import wait_for_signal

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT")

_CAN_NOT_START = 2
_SHARE_MEMORY = frozenset({"trainer", "sampler"})
"""Pods that open each other's weights by `/proc`, where they are on one machine (ADR 38)."""
LOST_EXIT_CODE = 3
"""Of a process whose work another one took over."""
_STDERR = 2
TERMINATION_LOG = "TINSMITH_TERMINATION_LOG"
"""Names the variable with the file where the cluster looks for the reason of an end."""
_MAX_SENTENCE = 1000
"""Characters; of 4,096 bytes a cluster keeps the end, and what is wrong stands at the beginning."""


def run_pod(
    pod: str, config_class: type[ConfigT], serve: Callable[[ConfigT], Coroutine[Any, Any, None]]
) -> int:
    """Read the settings of a pod, serve until a signal, and return the exit code of the process.

    Args:
        pod: Name of the pod, such as `trainer`.
        config_class: Its settings, read from `--config FILE` and `TINSMITH_*` variables.
        serve: Serves until the process is asked to stop.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tinsmith_{pod}",
        description=f"One {pod} as its own process.",
        epilog=describe_settings(config_class),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="TOML file; TINSMITH_* variables win")
    arguments = parser.parse_args()
    configure_logging(pod)
    if IS_LINUX:
        gain_no_privileges()
        if pod not in _SHARE_MEMORY:
            # Variables hold the keys of the pod, and what it starts may run strangers' work.
            hide()
    # What native code aborts leaves the stacks of its threads in the log, and not only a number.
    faulthandler.enable(_STDERR)
    try:
        start_traces()
        asyncio.run(serve(load_config(config_class, path=arguments.config)))
    except (ConfigError, TinsmithError) as error:
        problem = sentence_of(error)
        if sys.stderr.isatty():
            sys.stderr.write(f"error: {problem}\n")
        else:
            logger.critical("cannot start", extra={"problem": problem})
        write_termination_reason(problem)
        return _CAN_NOT_START
    except Exception as error:
        write_termination_reason(f"{type(error).__name__}: {error}")
        raise
    return 0


def start_traces() -> None:
    """Record traces if variables say where they go.

    Raises:
        ConfigError: If OpenTelemetry is not installed.
    """
    try:
        switch.start()
    except ConfigurationError as error:
        raise ConfigError(sentence_of(error)) from error


def write_termination_reason(problem: str) -> None:
    """Say in one line why the process ends where its cluster looks, if it runs in one."""
    path = os.environ.get(TERMINATION_LOG)
    if path:
        sentence = " ".join(problem.split())[:_MAX_SENTENCE]
        with contextlib.suppress(OSError):
            Path(path).write_bytes(sentence.encode("utf-8", "replace"))


def end_at_once(reason: str, *, exit_code: int = LOST_EXIT_CODE) -> NoReturn:
    """End the process without a drain: nothing that it still does may count."""
    logger.critical("ends at once", extra={"problem": reason})
    write_termination_reason(reason)
    os._exit(exit_code)


async def serve_exclusive(name: str, make: Callable[[Callable[[], None]], Pod]) -> None:
    """Serve a pod of which one process works at a time, until a signal; see `serve`.

    Args:
        name: Name of the pod, such as `scheduler`.
        make: Makes it, given what it calls if another process took over.
    """
    await serve(make(lambda: end_at_once(f"another {name} took over")))


def freeze_started() -> None:
    """Take what the start has made off the garbage collector's list.

    It lives as long as the process. A collection that walks through it stops all calls for a tenth
    of a second, again and again.
    """
    gc.collect()
    gc.freeze()


async def serve(pod: Pod, *, on_started: Callable[[], None] = lambda: None) -> None:
    """Serve a pod until a signal.

    Args:
        pod: What is served.
        on_started: Called once it serves.
    """
    # Listened for from the beginning: a signal that comes during the start, which lasts as long as
    # another process holds the database, ends it in order.
    stopped = asyncio.create_task(wait_for_signal())
    start = asyncio.create_task(pod.start())
    await asyncio.wait((start, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start
        return
    await start
    freeze_started()
    on_started()
    try:
        await stopped
    finally:
        await pod.stop()
