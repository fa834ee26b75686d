"""Lists of the contract, read to their end, a page at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc.aio

from tinsmith.rpc.transport import Connection, Endpoint, Transport

Response = TypeVar("Response")

_PAGE_SIZE = 1000


async def read_pages(
    transport: Transport,
    endpoint: Endpoint,
    method: Callable[[Connection], grpc.aio.UnaryUnaryMultiCallable[Any, Response]],
    request: Any,
) -> AsyncIterator[Response]:
    """Yield the answers of a list, page by page. Runs in the background loop.

    Args:
        transport: Sends calls.
        endpoint: Where the list is.
        method: The stub's method.
        request: The request; its page fields are set here.

    Raises:
        TinsmithError: If a page cannot be read.
    """
    request.page_size = _PAGE_SIZE
    while True:
        answer: Any = await transport.call(endpoint, method, request)
        yield answer
        if not answer.next_page_token:
            return
        request.page_token = answer.next_page_token
