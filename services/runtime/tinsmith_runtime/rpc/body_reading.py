"""The request of a call, read when there is room for it.

gRPC tells the size of a message once it has taken all of it. So a read counts as the largest
message that there may be. The reads that go on at once are bounded, and shared out by project. What
has arrived counts as what it is, until its call ends. A message that does not arrive in time is
given up: slow senders hold places.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tinsmith.errors import DeadlineExceededError
from tinsmith_runtime.errors import MalformedRequestError
from tinsmith_runtime.fairness.fair_slots import FairSlots
from tinsmith_runtime.rpc.in_flight import AdmittedRequest

_SHARE_OF_PROJECT = 2
"""A project has at most one of so many places."""


class BodyReader:
    """Reads the requests of a server's calls.

    Args:
        num_reads: How many are read at once.
        deadline_s: How long one may take to arrive.
    """

    def __init__(self, num_reads: int, *, deadline_s: float) -> None:
        self._slots = FairSlots(num_reads, max(num_reads // _SHARE_OF_PROJECT, 1))
        self._deadline_s = deadline_s

    async def read(
        self,
        bodies: AsyncIterator[bytes],
        admission: AdmittedRequest,
        *,
        method: str,
        project: str,
        timeout_s: float,
    ) -> bytes:
        """Return the next request of a call, counted as what its key has in flight.

        Args:
            bodies: The requests of the call.
            admission: Counts the call.
            method: Its full name.
            project: Whose it is.
            timeout_s: Time that the call has left.

        Raises:
            MalformedRequestError: If the call ends without a request.
            DeadlineExceededError: If it does not arrive in time.
            RateLimitedError: If too many bytes are in flight.
        """
        async with self._slots.hold(project):
            body = await first_of(
                aiter(bodies), method=method, timeout_s=min(timeout_s, self._deadline_s)
            )
        if body is None:
            raise MalformedRequestError(
                f"the call of {method} ended without a request", method=method
            )
        admission.add_bytes(len(body))
        return body


async def first_of(bodies: AsyncIterator[bytes], *, method: str, timeout_s: float) -> bytes | None:
    """Return the first request of a stream, for which a client may take its time; None for none.

    Raises:
        DeadlineExceededError: If it does not arrive in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(bodies, None)
    except TimeoutError as error:
        raise DeadlineExceededError(
            f"no request of {method} arrived in time; send it again, smaller or faster",
            method=method,
        ) from error


async def counted_one_by_one(
    bodies: AsyncIterator[bytes], admission: AdmittedRequest
) -> AsyncIterator[bytes]:
    """Yield the requests of a stream; what its key has in flight is the last one.

    Raises:
        RateLimitedError: If too many bytes are in flight.
    """
    async for body in bodies:
        admission.add_bytes(len(body) - admission.num_bytes)
        yield body
