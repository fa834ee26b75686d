"""Spans: where they are begun, and how a place asks whether they are wanted.

Traces are off until `switch.start` finds an endpoint. Until then nothing of OpenTelemetry is
imported, and a place that could begin a span asks `is_on` alone. What a span is made of is the
recorder's; this module knows no library.

Attributes hold names, counts and states. Prompts, completions, weights and keys are never among
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Literal, Protocol

Value = str | int | float | bool | Sequence[str]
Kind = Literal["internal", "client", "server"]
Headers = tuple[tuple[str, str], ...]

CLIENT = "client"
"""The service of what runs in no pod."""


class Span(Protocol):
    """A piece of work with a beginning and an end, below another one."""

    @property
    def trace_id(self) -> str:
        """The trace, 32 hexadecimal digits."""
        ...

    def headers(self) -> Headers:
        """Return the metadata with which another process goes on (W3C Trace Context)."""
        ...

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes."""
        ...

    def enter(self) -> None:
        """Be the parent of what the current task begins from now on."""
        ...

    def within(self) -> contextlib.AbstractContextManager[object]:
        """Be the parent of what is begun within a block."""
        ...

    def end(self, *, problem: str = "", end_s: float | None = None) -> None:
        """Note the end, at a time since the epoch or now; a `problem` makes it a failure."""
        ...


class Recorder(Protocol):
    """Makes spans and sends them on."""

    def begin(
        self,
        service: str,
        name: str,
        *,
        kind: Kind,
        parent: Span | None,
        is_root: bool,
        links: Iterable[Span],
        attributes: Mapping[str, Value],
        begin_s: float | None,
    ) -> Span:
        """Return a span that has begun; see `begin` of this module."""
        ...

    def current(self) -> Span | None:
        """Return the span that the current task is within."""
        ...

    def received(self, headers: Mapping[str, str]) -> Span | None:
        """Return the span of another process that metadata names."""
        ...

    def flush(self) -> None:
        """Send what has ended."""
        ...


_recorder: Recorder | None = None
_service: ContextVar[str] = ContextVar("tinsmith_trace_service", default=CLIENT)


def install(recorder: Recorder | None) -> None:
    """Record spans from now on; None records none."""
    global _recorder
    _recorder = recorder


def is_on() -> bool:
    """Whether spans are recorded; what follows may be called only then."""
    return _recorder is not None


def bind_service(service: str) -> None:
    """Have the spans that the current task begins belong to a service."""
    _service.set(service)


def begin(
    name: str,
    *,
    service: str = "",
    kind: Kind = "internal",
    parent: Span | None = None,
    is_root: bool = False,
    links: Iterable[Span] = (),
    attributes: Mapping[str, Value] | None = None,
    begin_s: float | None = None,
) -> Span:
    """Begin a span; its `end` must follow.

    Args:
        name: What is done.
        service: The pod that does it; that of the current task by default.
        kind: `client` and `server` are the two ends of a call.
        parent: What it is a part of; what the current task is within by default.
        is_root: Whether it is a part of nothing.
        links: Spans that it works for, of whatever traces.
        attributes: What is known of it.
        begin_s: When it began, since the epoch; now by default.
    """
    return _active().begin(
        service or _service.get(),
        name,
        kind=kind,
        parent=parent,
        is_root=is_root,
        links=links,
        attributes=attributes or {},
        begin_s=begin_s,
    )


def current() -> Span | None:
    """Return the span that the current task is within."""
    return _active().current()


def received(headers: Mapping[str, str]) -> Span | None:
    """Return the span of another process that the metadata of a call names."""
    return _active().received(headers)


@contextlib.contextmanager
def block(
    name: str, attributes: Mapping[str, Value] | None = None, *, begins: bool = False
) -> Iterator[None]:
    """Have what is begun within a block be a part of a span.

    Args:
        name: What is done.
        attributes: What is known of it.
        begins: Whether a block that is part of no trace begins one; else it is no span.
    """
    if _recorder is None or not (begins or _recorder.current()):
        yield
        return
    span = begin(name, attributes=attributes)
    try:
        with span.within():
            yield
    except BaseException as error:
        span.end(problem=type(error).__name__)
        raise
    span.end()


def _active() -> Recorder:
    if _recorder is None:
        raise RuntimeError("traces are off: ask is_on first")
    return _recorder
