"""A protocol that tests serve in place of the OpenAI API: an echo, and calls that they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.fakes.gateway_harness import TIMEOUT_S, GatewayRig

from tinsmith_gateway.endpoint import Call, endpoint
from tinsmith_gateway.openai.streaming import begin_stream
from tinsmith_gateway.services import Services
from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.rpc.permissions import ALL

HEALTHZ = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def render(error: TinsmithError, status: int, headers: dict[str, str]) -> Response:
    return JSONResponse({"reason": error.reason}, status_code=status, headers=headers)


class Protocol:
    """A small protocol beside the others: an echo, a wait and a task that tests hold."""

    def __init__(self) -> None:
        self.hold = asyncio.Event()
        self.num_entered = 0

    def routes(self, services: Services, calls: object) -> list[Route]:
        del calls

        async def echo(call: Call) -> Response:
            return Response(call.body, media_type="application/octet-stream")

        async def held(call: Call) -> Response:
            self.num_entered += 1
            await self.hold.wait()
            return JSONResponse({"project": call.credential.project})

        async def tokens(call: Call) -> Response:
            call.admission.add_tokens(int(call.body))
            return await held(call)

        async def chunks(call: Call) -> AsyncGenerator[dict[str, Any]]:
            yield {"n": 1}
            self.num_entered += 1
            await self.hold.wait()

        async def stream(call: Call) -> Response:
            return await begin_stream(call, chunks(call))

        return [
            Route("/stream", endpoint(services, stream, render, access=ALL), methods=["POST"]),
            Route("/echo", endpoint(services, echo, render, access=ALL), methods=["POST"]),
            Route("/held", endpoint(services, held, render, access=ALL), methods=["POST"]),
            Route("/tokens", endpoint(services, tokens, render, access=ALL), methods=["POST"]),
            Route(
                "/wait",
                endpoint(services, held, render, access=ALL, is_wait=True),
                methods=["POST"],
            ),
        ]


def headers(rig: GatewayRig) -> dict[str, str]:
    return {"x-api-key": rig.key}


async def connect(rig: GatewayRig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = rig.gateway.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """Return what arrives until the other side closes or cuts."""
    received = b""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while chunk := await reader.read(65536):
                received += chunk
    except ConnectionError:
        pass
    return received
