"""Where an optional service listens, as the scheduler says; asked once, and again when it moves."""

from __future__ import annotations

from collections.abc import Callable

from tinsmith.errors import FailedPreconditionError
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.transport import Endpoint
from tinsmith.v1 import scheduler_pb2


class LocatedService:
    """A service that a server may have or not.

    Args:
        core: What the client shares.
        address_of: Picks its address from the capabilities of the server.
        missing: What is said where there is none.
        remedy: What to do then.
    """

    def __init__(
        self,
        core: ClientCore,
        address_of: Callable[[scheduler_pb2.Capabilities], str],
        *,
        missing: str,
        remedy: str,
    ) -> None:
        self._core = core
        self._address_of = address_of
        self._missing = missing
        self._remedy = remedy
        self._found: Endpoint | None = None

    @classmethod
    def of_coordinator(cls, core: ClientCore, otherwise: str = "") -> LocatedService:
        """Return that of the coordinator; `otherwise` goes on with what to do without one."""
        return cls(
            core,
            lambda server: server.coordinator_address,
            missing="the server has no coordinator",
            remedy=f"start a coordinator worker{otherwise}",
        )

    async def endpoint(self) -> Endpoint:
        """Return where it listens.

        Raises:
            FailedPreconditionError: If the server has none.
        """
        if self._found is None:
            address = await self._locate()
            if not address:
                raise FailedPreconditionError(self._missing, remedy=self._remedy)
            self._found = Endpoint(address, self._locate)
        return self._found

    async def _locate(self) -> str:
        request = scheduler_pb2.GetCapabilitiesRequest(parent=self._core.project)
        answer = await self._core.transport.call(
            self._core.scheduler, lambda c: c.scheduler.GetCapabilities, request
        )
        return self._address_of(answer)
