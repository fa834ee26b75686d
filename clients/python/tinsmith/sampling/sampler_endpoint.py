"""The samplers of a sampling session: each call goes to one of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from tinsmith.errors import TinsmithError
from tinsmith.replicas import Replicas, prompt_bytes
from tinsmith.rpc.transport import Endpoint
from tinsmith.v1 import trajectories_pb2

_REFRESH_S = 30.0


class SamplerEndpoint:
    """Where the samplers of a session listen.

    Args:
        addresses: Of all of them; at least one.
        locate: Asks for them again.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        locate: Callable[[], Awaitable[Sequence[str]]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses = list(addresses)
        self._locate = locate
        self._replicas = Replicas()
        self._clock = clock
        self._refresh_s = clock() + _REFRESH_S
        self._refreshing: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def of(self, prompt: trajectories_pb2.ModelInput) -> Iterator[Endpoint]:
        """Hold the endpoint of a call about a prompt; it is counted while it is held."""
        key = prompt_bytes(prompt)
        address = self._replicas.choose(self._addresses, key).address
        if self._clock() > self._refresh_s:
            # Replicas may have come meanwhile.
            self._refresh_s = self._clock() + _REFRESH_S
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())

        async def locate() -> str:
            self._replicas.note_failure(endpoint.address)
            await self._refresh()
            return self._replicas.choose(self._addresses, key).address

        endpoint = Endpoint(address, locate)
        with self._replicas.in_flight(address):
            yield endpoint

    async def _refresh(self) -> None:
        with contextlib.suppress(TinsmithError):
            self._addresses = list(await self._locate()) or self._addresses
