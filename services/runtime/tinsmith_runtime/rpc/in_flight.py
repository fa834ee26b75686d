"""How much one project, and all together, may have in flight: requests, waits, bytes, tokens.

A project has any number of keys, so its keys share its bounds. A caller that asks for more is told
when to come again; nothing is queued here, so that no project can fill a queue which others wait
in. Waits (long polls, heartbeats) are counted apart: a thousand of them cost less than one batch,
and a client that holds many futures must still get its next request through.

A project with nothing in flight is admitted, whatever the size: a single request is bounded by the
limits of a request, and one that is larger than its project's share would otherwise never be
served. What all have in flight is a bound of the process's memory, and holds without exception.

Greedy projects leave room for the next one: each may have so many times what is left free (dynamic
thresholds: Choudhury and Hahne, 1998). One alone may have three quarters of the whole, two of them
three sevenths each, and so on. Those parts are equal only among projects that ask equally often.
So a project that was refused, and has less than its part, comes first for a while: it may have what
is free, and those that have their part get nothing more.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from tinsmith_runtime.errors import ConfigError, RateLimitedError
from tinsmith_runtime.observability.metrics import (
    RPC_BYTES_IN_FLIGHT,
    RPC_LIMITED,
    RPC_REQUESTS_IN_FLIGHT,
)

_REMEMBERED_ENDS = 64
_MIN_DELAY_S, _MAX_DELAY_S = 0.1, 30.0
_DEFAULT_DELAY_S = 1.0
_TIMES_FREE = 3
"""A project may have so many times what is left free."""
_TIMES_WAITED = 2
"""A project that was refused comes first for so many times the pause that it was told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitSettings:
    """What one project, and all together, may have in flight; 0 sets no limit."""

    max_requests_per_project: int = 4096
    max_waits_per_project: int = 8192
    max_bytes_per_project: int = 2**30
    max_tokens_per_project: int = 16 * 2**20
    max_requests: int = 0
    max_waits: int = 0
    max_bytes: int = 0

    def __post_init__(self) -> None:
        for name in (
            "max_requests",
            "max_waits",
            "max_bytes",
            "max_requests_per_project",
            "max_waits_per_project",
            "max_bytes_per_project",
            "max_tokens_per_project",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")


@dataclass(slots=True)
class InFlightCounts:
    """What a project has in flight."""

    num_requests: int = 0
    num_waits: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_ENDS))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not (self.num_requests or self.num_waits)

    def number(self, what: str) -> int:
        """Return how many requests, waits, bytes or tokens."""
        number: int = getattr(self, f"num_{what}")
        return number


class Limits:
    """Counts what is in flight by project, and refuses what is too much.

    Args:
        settings: The limits.
        clock: Monotonic seconds.
    """

    def __init__(
        self, settings: LimitSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._in_flight: dict[str, InFlightCounts] = {}
        self._all = InFlightCounts()
        # Until when a project that was refused for want of room is waited for.
        self._refused: defaultdict[str, dict[str, float]] = defaultdict(dict)

    def admit(
        self, project: str | None, num_bytes: int = 0, *, is_wait: bool = False
    ) -> AdmittedRequest:
        """Count a request until the context that is returned ends.

        Args:
            project: Whose it is; None for a caller to which no bound of a project applies.
            num_bytes: Size of its body, as far as known.
            is_wait: Whether it only waits.

        Raises:
            RateLimitedError: If the project has too much in flight, or all together; nothing was
                counted.
        """
        in_flight = (project is not None and self._in_flight.get(project)) or InFlightCounts()
        is_bound = project is not None
        self._check("waits" if is_wait else "requests", project, in_flight, 1, is_bound=is_bound)
        self._check(
            "bytes", project, in_flight, num_bytes, is_bound=is_bound and in_flight.num_bytes > 0
        )
        if project is not None:
            self._in_flight[project] = in_flight
        for counted in (in_flight, self._all):
            if is_wait:
                counted.num_waits += 1
            else:
                counted.num_requests += 1
            counted.num_bytes += num_bytes
        if not is_wait:
            RPC_REQUESTS_IN_FLIGHT.inc()
        RPC_BYTES_IN_FLIGHT.inc(num_bytes)
        return AdmittedRequest(self, project, in_flight, num_bytes, is_wait)

    def in_flight_of(self, project: str) -> InFlightCounts:
        """Return what a project has in flight."""
        return self._in_flight.get(project) or InFlightCounts()

    @property
    def num_projects(self) -> int:
        """Number of projects that are remembered: those with something in flight."""
        return len(self._in_flight)

    def add_bytes(self, admission: AdmittedRequest, num_bytes: int) -> None:
        """Count more bytes of an admitted request; see `AdmittedRequest.add_bytes`."""
        in_flight = admission.in_flight
        # Alone, a request may be as large as requests may be.
        has_others = admission.project is not None and in_flight.num_bytes > admission.num_bytes
        self._check("bytes", admission.project, in_flight, num_bytes, is_bound=has_others)
        in_flight.num_bytes += num_bytes
        self._all.num_bytes += num_bytes
        admission.num_bytes += num_bytes
        RPC_BYTES_IN_FLIGHT.inc(num_bytes)

    def add_tokens(self, admission: AdmittedRequest, num_tokens: int) -> None:
        """Count tokens of an admitted request; see `AdmittedRequest.add_tokens`."""
        in_flight = admission.in_flight
        has_others = in_flight.num_tokens > admission.num_tokens
        self._check("tokens", admission.project, in_flight, num_tokens, is_bound=has_others)
        in_flight.num_tokens += num_tokens
        admission.num_tokens += num_tokens

    def release(self, admission: AdmittedRequest) -> None:
        """Take a request off the count; repeating it changes nothing."""
        if admission.is_released:
            return
        admission.is_released = True
        in_flight = admission.in_flight
        for counted in (in_flight, self._all):
            if admission.is_wait:
                counted.num_waits -= 1
            else:
                counted.num_requests -= 1
                counted.ends_s.append(self._clock())
            counted.num_bytes -= admission.num_bytes
        if not admission.is_wait:
            RPC_REQUESTS_IN_FLIGHT.dec()
        in_flight.num_tokens -= admission.num_tokens
        RPC_BYTES_IN_FLIGHT.dec(admission.num_bytes)
        if in_flight.is_idle and admission.project is not None:
            self._in_flight.pop(admission.project, None)

    def _check(
        self,
        what: str,
        project: str | None,
        in_flight: InFlightCounts,
        added: int,
        *,
        is_bound: bool,
    ) -> None:
        of_project, of_all = in_flight.number(what), self._all.number(what)
        limit: int = getattr(self._settings, f"max_{what}_per_project")
        # Tokens are bounded by project alone.
        limit_of_all: int = getattr(self._settings, f"max_{what}", 0)
        if limit_of_all and of_all + added > limit_of_all:
            # One that has its own limit would be refused in an empty server too.
            if not limit or of_project + added <= limit:
                self._wait_for(what, project, self._all)
            raise self._refusal(
                f"the server has too many {what} in flight: {of_all + added} with this request, "
                f"{limit_of_all} allowed",
                self._all,
                f"{what} of all projects",
                limit_of_all,
            )
        if project is None or not is_bound or not of_project:
            return
        if limit_of_all and not (limit and of_project + added > limit):
            limit = self._part(what, project, limit, limit_of_all)
            if of_project + added > limit:
                self._wait_for(what, project, in_flight)
        elif not limit:
            return
        if of_project + added > limit:
            raise self._refusal(
                f"this project has too many {what} in flight: {of_project + added} with this "
                f"request, {limit} allowed",
                in_flight,
                what,
                limit,
            )

    def _part(self, what: str, project: str, limit: int, limit_of_all: int) -> int:
        """Return how much of a whole a project may have at the moment."""
        free = limit_of_all - self._all.number(what)
        mine, part = self.in_flight_of(project).number(what), _TIMES_FREE * free
        now_s, refused = self._clock(), self._refused[what]
        for name in [name for name, until_s in refused.items() if until_s < now_s]:
            del refused[name]
        others = [self.in_flight_of(name).number(what) for name in refused if name != project]
        if not others:
            return part
        # What all of these would have if they shared what the rest leaves.
        room = free + mine + sum(others)
        equal = _TIMES_FREE * room // (1 + _TIMES_FREE * (1 + len(others)))
        if mine < equal:
            return max(part, min(equal, mine + free))
        # One that has as much as it may have on its own is waited for no longer.
        return min(part, equal) if min(others) < min(equal, limit or equal) else part

    def _wait_for(self, what: str, project: str | None, in_flight: InFlightCounts) -> None:
        """Let a project come first until the pause that it is told is over, and once more."""
        if project is not None:
            self._refused[what][project] = (
                self._clock() + _TIMES_WAITED * self.delay_s(in_flight) + _DEFAULT_DELAY_S
            )

    def _refusal(
        self, problem: str, in_flight: InFlightCounts, what: str, limit: int
    ) -> RateLimitedError:
        RPC_LIMITED.labels(what).inc()
        return RateLimitedError(
            f"{problem}; send it again when others have ended",
            retry_after_s=self.delay_s(in_flight),
            what=what,
            limit=limit,
        )

    def delay_s(self, in_flight: InFlightCounts) -> float:
        """Return when a place is likely free: the mean time between the last ends."""
        if len(in_flight.ends_s) < 2:
            return _DEFAULT_DELAY_S
        # Up to now, not to the last end: a project whose requests hang is told to wait longer.
        mean_s = (self._clock() - in_flight.ends_s[0]) / (len(in_flight.ends_s) - 1)
        return min(max(mean_s, _MIN_DELAY_S), _MAX_DELAY_S)


@dataclass(slots=True, eq=False)
class AdmittedRequest:
    """A request that was let in; counted until it leaves this context, unless it is kept."""

    _limits: Limits
    project: str | None
    in_flight: InFlightCounts
    num_bytes: int
    is_wait: bool
    num_tokens: int = 0
    is_released: bool = False
    is_kept: bool = False

    def __enter__(self) -> AdmittedRequest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.is_kept:
            self._limits.release(self)

    def keep(self) -> None:
        """Count on beyond the context, until `release`: an answer is a stream that goes on."""
        self.is_kept = True

    def release(self) -> None:
        """Take the request off the count; repeating it changes nothing."""
        self._limits.release(self)

    def add_bytes(self, num_bytes: int) -> None:
        """Count bytes as they arrive.

        Raises:
            RateLimitedError: If the project has too many in flight; these were not counted.
        """
        self._limits.add_bytes(self, num_bytes)

    def add_tokens(self, num_tokens: int) -> None:
        """Count tokens once they are known, before the work that they cost.

        Raises:
            RateLimitedError: If the project has too many in flight; these were not counted.
        """
        self._limits.add_tokens(self, num_tokens)
