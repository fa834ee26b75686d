"""How much one key, and all keys together, may have in flight: requests, waits, bytes, tokens.

A key that asks for more is told when to come again; nothing is queued here, so that one key cannot
fill a queue which others wait in. Waits (long polls, heartbeats) are counted apart: a thousand of
them cost less than one batch, and a client that holds many futures must still get its next request
through.

A key with nothing in flight is admitted, whatever the size: a single request is bounded by the
limits of a request, and one that is larger than its key's share would otherwise never be served.
What all keys have in flight is a bound of the process's memory, and holds without exception.
"""

from __future__ import annotations

import time
from collections import deque
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitSettings:
    """What one key, and all keys together, may have in flight; 0 sets no limit."""

    max_requests_per_key: int = 4096
    max_waits_per_key: int = 8192
    max_bytes_per_key: int = 2**30
    max_tokens_per_key: int = 16 * 2**20
    max_requests: int = 0
    max_waits: int = 0
    max_bytes: int = 0

    def __post_init__(self) -> None:
        for name in (
            "max_requests",
            "max_waits",
            "max_bytes",
            "max_requests_per_key",
            "max_waits_per_key",
            "max_bytes_per_key",
            "max_tokens_per_key",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")


@dataclass(slots=True)
class Usage:
    """What a key has in flight."""

    num_requests: int = 0
    num_waits: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_ENDS))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not (self.num_requests or self.num_waits)


class Limits:
    """Counts what is in flight by key, and refuses what is too much.

    Args:
        settings: The limits.
        clock: Monotonic seconds.
    """

    def __init__(
        self, settings: LimitSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._usage: dict[str, Usage] = {}
        self._all = Usage()

    def admit(self, key_id: str | None, num_bytes: int = 0, *, is_wait: bool = False) -> Admission:
        """Count a request until the context that is returned ends.

        Args:
            key_id: Whose it is; None for a caller to which no bound of a key applies.
            num_bytes: Size of its body, as far as known.
            is_wait: Whether it only waits.

        Raises:
            RateLimitedError: If the key has too much in flight, or all keys together; nothing was
                counted.
        """
        usage = (key_id is not None and self._usage.get(key_id)) or Usage()
        if is_wait:
            _check(self, usage, "waits", usage.num_waits + 1, self._settings.max_waits_per_key)
            self._check_all("waits", self._all.num_waits + 1, self._settings.max_waits)
        else:
            _check(
                self, usage, "requests", usage.num_requests + 1, self._settings.max_requests_per_key
            )
            self._check_all("requests", self._all.num_requests + 1, self._settings.max_requests)
        if usage.num_bytes:
            _check(
                self, usage, "bytes", usage.num_bytes + num_bytes, self._settings.max_bytes_per_key
            )
        self._check_all("bytes", self._all.num_bytes + num_bytes, self._settings.max_bytes)
        if key_id is not None:
            self._usage[key_id] = usage
        for counted in (usage, self._all):
            if is_wait:
                counted.num_waits += 1
            else:
                counted.num_requests += 1
            counted.num_bytes += num_bytes
        if not is_wait:
            RPC_REQUESTS_IN_FLIGHT.inc()
        RPC_BYTES_IN_FLIGHT.inc(num_bytes)
        return Admission(self, key_id, usage, num_bytes, is_wait)

    def usage_of(self, key_id: str) -> Usage:
        """Return what a key has in flight."""
        return self._usage.get(key_id) or Usage()

    @property
    def num_keys(self) -> int:
        """Number of keys that are remembered: those with something in flight."""
        return len(self._usage)

    def add_bytes(self, admission: Admission, num_bytes: int) -> None:
        """Count more bytes of an admitted request; see `Admission.add_bytes`."""
        usage = admission.usage
        if usage.num_bytes > admission.num_bytes:
            # Others of this key are in flight; alone, a request may be as large as requests may be.
            _check(
                self, usage, "bytes", usage.num_bytes + num_bytes, self._settings.max_bytes_per_key
            )
        self._check_all("bytes", self._all.num_bytes + num_bytes, self._settings.max_bytes)
        usage.num_bytes += num_bytes
        self._all.num_bytes += num_bytes
        admission.num_bytes += num_bytes
        RPC_BYTES_IN_FLIGHT.inc(num_bytes)

    def add_tokens(self, admission: Admission, num_tokens: int) -> None:
        """Count tokens of an admitted request; see `Admission.add_tokens`."""
        usage = admission.usage
        if usage.num_tokens > admission.num_tokens:
            _check(
                self,
                usage,
                "tokens",
                usage.num_tokens + num_tokens,
                self._settings.max_tokens_per_key,
            )
        usage.num_tokens += num_tokens
        admission.num_tokens += num_tokens

    def release(self, admission: Admission) -> None:
        """Take a request off the count; repeating it changes nothing."""
        if admission.is_released:
            return
        admission.is_released = True
        usage = admission.usage
        for counted in (usage, self._all):
            if admission.is_wait:
                counted.num_waits -= 1
            else:
                counted.num_requests -= 1
                counted.ends_s.append(self._clock())
            counted.num_bytes -= admission.num_bytes
        if not admission.is_wait:
            RPC_REQUESTS_IN_FLIGHT.dec()
        usage.num_tokens -= admission.num_tokens
        RPC_BYTES_IN_FLIGHT.dec(admission.num_bytes)
        if usage.is_idle and admission.key_id is not None:
            self._usage.pop(admission.key_id, None)

    def _check_all(self, what: str, wanted: int, limit: int) -> None:
        if limit == 0 or wanted <= limit:
            return
        RPC_LIMITED.labels(f"{what} of all keys").inc()
        raise RateLimitedError(
            f"the server has too many {what} in flight: {wanted} with this request, {limit} "
            "allowed; send it again when others have ended",
            retry_after_s=self.delay_s(self._all),
            what=f"{what} of all keys",
            limit=limit,
        )

    def delay_s(self, usage: Usage) -> float:
        """Return when a place is likely free: the mean time between the last ends."""
        if len(usage.ends_s) < 2:
            return _DEFAULT_DELAY_S
        # Up to now, not to the last end: a key whose requests hang is told to wait longer.
        mean_s = (self._clock() - usage.ends_s[0]) / (len(usage.ends_s) - 1)
        return min(max(mean_s, _MIN_DELAY_S), _MAX_DELAY_S)


@dataclass(slots=True, eq=False)
class Admission:
    """A request that was let in; counted until it leaves this context, unless it is kept."""

    _limits: Limits
    key_id: str | None
    usage: Usage
    num_bytes: int
    is_wait: bool
    num_tokens: int = 0
    is_released: bool = False
    is_kept: bool = False

    def __enter__(self) -> Admission:
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
            RateLimitedError: If the key has too many in flight; these were not counted.
        """
        self._limits.add_bytes(self, num_bytes)

    def add_tokens(self, num_tokens: int) -> None:
        """Count tokens once they are known, before the work that they cost.

        Raises:
            RateLimitedError: If the key has too many in flight; these were not counted.
        """
        self._limits.add_tokens(self, num_tokens)


def _check(limits: Limits, usage: Usage, what: str, wanted: int, limit: int) -> None:
    if limit == 0 or wanted <= limit:
        return
    RPC_LIMITED.labels(what).inc()
    raise RateLimitedError(
        f"this key has too many {what} in flight: {wanted} with this request, {limit} allowed; "
        "send it again when others have ended",
        retry_after_s=limits.delay_s(usage),
        what=what,
        limit=limit,
    )
