"""`python -m tests.fuzz.neighbour ADDRESS KEY PROJECT`: a client that behaves and measures.

It sends one call after the other, half of them native, until its input ends. Then it prints the
times that they took, in seconds, and what failed, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import grpc
import grpc.aio
import httpx

from tinsmith.v1 import scheduler_pb2

_PAUSE_S, _TIMEOUT_S = 0.02, 30.0


async def main(address: str, key: str, parent: str) -> None:
    """Measure until the input ends."""
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    times_s: dict[str, list[float]] = {"native": [], "over_http": []}
    failures: list[str] = []
    async with (
        grpc.aio.insecure_channel(address) as channel,
        httpx.AsyncClient(base_url=f"http://{address}", headers={"x-api-key": key}) as http,
    ):
        get_capabilities: Any = channel.unary_unary(
            "/tinsmith.v1.SchedulerService/GetCapabilities",
            request_serializer=scheduler_pb2.GetCapabilitiesRequest.SerializeToString,
        )

        async def native() -> None:
            metadata = (("authorization", f"Bearer {key}"),)
            await get_capabilities(
                scheduler_pb2.GetCapabilitiesRequest(parent=parent),
                metadata=metadata,
                timeout=_TIMEOUT_S,
            )

        async def over_http() -> None:
            answer = await http.get("/v1/models", timeout=_TIMEOUT_S)
            answer.raise_for_status()

        calls = [native, over_http]
        for call in calls:
            await call()
        while not ended.done():
            for call in calls:
                begin_s = time.perf_counter()
                try:
                    await call()
                except (grpc.aio.AioRpcError, httpx.HTTPError) as error:
                    failures.append(repr(error)[:300])
                times_s[call.__name__].append(time.perf_counter() - begin_s)
            await asyncio.sleep(_PAUSE_S)
    json.dump({"times_s": times_s, "failures": failures[:20]}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
