"""A proxy in front of PostgreSQL that loses the connection where a test says so."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

# A message of the simple protocol: kind, length, text, zero.
COMMIT = b"Q\0\0\0\x0bCOMMIT\0"


class PostgresProxy:
    """Passes bytes on between clients and one server.

    `lose_request` cuts the connection instead of passing on the next COMMIT; `lose_answer` passes
    it on, waits for the answer and cuts the connection instead of passing that on.
    """

    def __init__(self, url: str) -> None:
        self.lose_request = False
        self.lose_answer = False
        self.num_lost = 0
        self._url = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The database, as seen through the proxy."""
        user = self._url.netloc.rpartition("@")[0]
        return self._url._replace(netloc=f"{user}@127.0.0.1:{self._port}").geturl()

    async def open(self) -> None:
        """Take connections."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Cut all connections and refuse new ones; `open` takes them again, on the same port."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> PostgresProxy:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        ends = {writer}
        try:
            answers, server = await asyncio.open_connection(self._url.hostname, self._url.port)
            ends.add(server)
            self._writers.add(server)
            is_answer_lost = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_requests(reader, server, is_answer_lost))
                group.create_task(self._pass_answers(answers, writer, is_answer_lost))
        except* OSError:
            pass
        finally:
            self._cut(ends)

    async def _pass_requests(
        self,
        requests: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        is_answer_lost: asyncio.Event,
    ) -> None:
        while content := await requests.read(65536):
            if COMMIT in content and self.lose_request:
                self.lose_request = False
                self.num_lost += 1
                raise ConnectionAbortedError
            if COMMIT in content and self.lose_answer:
                self.lose_answer = False
                is_answer_lost.set()
            server.write(content)
            await server.drain()
        raise ConnectionAbortedError

    async def _pass_answers(
        self,
        answers: asyncio.StreamReader,
        client: asyncio.StreamWriter,
        is_answer_lost: asyncio.Event,
    ) -> None:
        while content := await answers.read(65536):
            if is_answer_lost.is_set():
                self.num_lost += 1
                break
            client.write(content)
            await client.drain()
        raise ConnectionAbortedError

    def _cut(self, writers: set[asyncio.StreamWriter] | None = None) -> None:
        for writer in tuple(self._writers if writers is None else writers):
            self._writers.discard(writer)
            writer.transport.abort()
