"""Lists of the contract, read to their end, a page at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from tinsmith.rpc.transport import Connection, Endpoint, Transport
from tinsmith.settings import RetryPolicy

Response = TypeVar("Response")

_PAGE_SIZE = 1000


async def pages(
    send: Callable[[Any], Awaitable[Response]], request: Any, *, page_size: int = _PAGE_SIZE
) -> AsyncGenerator[Response]:
    """Yield the answers of a list, page by page.

    Args:
        send: Sends one request of the list.
        request: The request; its page fields are set here.
        page_size: Most entries of a page.
    """
    request.page_size = page_size
    while True:
        answer: Any = await send(request)
        yield answer
        if not answer.next_page_token:
            return
        request.page_token = answer.next_page_token


async def read_pages(
    transport: Transport,
    endpoint: Endpoint,
    method: Callable[[Connection], grpc.aio.UnaryUnaryMultiCallable[Any, Response]],
    request: Any,
    *,
    retry: RetryPolicy | None = None,
) -> AsyncGenerator[Response]:
    """Yield the answers of a list, page by page. Runs in the background loop.

    Args:
        transport: Sends calls.
        endpoint: Where the list is.
        method: The stub's method.
        request: The request; its page fields are set here.
        retry: How each page is asked for again; as the client does by default.

    Raises:
        TinsmithError: If a page cannot be read.
    """

    def send(each: Any) -> Awaitable[Response]:
        return transport.call(endpoint, method, each, retry=retry)

    async for answer in pages(send, request):
        yield answer
