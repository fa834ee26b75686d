"""The samplers of a sampling session: each call goes to one of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

from tinsmith.errors import TinsmithError
from tinsmith.replicas import Choice, Replicas, prompt_bytes
from tinsmith.rpc.durations import decode_duration
from tinsmith.rpc.sampler_choice import choice_metadata
from tinsmith.rpc.transport import Endpoint
from tinsmith.v1 import scheduler_pb2, trajectories_pb2

_REFRESH_S = 5.0
"""Samplers tell what they have to do every few seconds."""


class SamplerEndpoint:
    """Where the samplers of a session listen.

    Args:
        session: The session with its samplers.
        address: Of the server, which is called if the session has no sampler at the moment.
        locate: Asks for the session again.
    """

    def __init__(
        self,
        session: scheduler_pb2.SamplingSession,
        address: str,
        locate: Callable[[], Awaitable[scheduler_pb2.SamplingSession]],
    ) -> None:
        self._addresses = [address]
        self._locate = locate
        self._replicas = Replicas()
        self._refresh_s = time.monotonic() + _REFRESH_S
        self._refreshing: asyncio.Task[None] | None = None
        self._take(session)

    @contextlib.contextmanager
    def of(self, prompt: trajectories_pb2.ModelInput) -> Iterator[Endpoint]:
        """Hold the endpoint of a call about a prompt; it is counted while it is held."""
        key = prompt_bytes(prompt)
        if time.monotonic() > self._refresh_s:
            # Replicas may have come meanwhile.
            self._refresh_s = time.monotonic() + _REFRESH_S
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
        with contextlib.ExitStack() as counted:

            def go(choice: Choice) -> str:
                counted.close()
                counted.enter_context(self._replicas.in_flight(choice.address))
                endpoint.metadata = choice_metadata(choice.reason)
                return choice.address

            async def locate() -> str:
                failed = endpoint.address
                self._replicas.note_failure(failed)
                await self._refresh()
                choice = self._replicas.choose(self._addresses, key)
                is_other = choice.address != failed
                return go(replace(choice, reason="failover") if is_other else choice)

            endpoint = Endpoint("", locate)
            endpoint.address = go(self._replicas.choose(self._addresses, key))
            yield endpoint

    async def _refresh(self) -> None:
        with contextlib.suppress(TinsmithError):
            self._take(await self._locate())

    def _take(self, session: scheduler_pb2.SamplingSession) -> None:
        self._addresses = list(session.sampler_addresses) or self._addresses
        self._replicas.note_loads(
            (load.address, load.num_requests, decode_duration(load.age))
            for load in session.sampler_loads
        )
