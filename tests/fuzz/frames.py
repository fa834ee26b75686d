"""HTTP/2 frames that are wrong on purpose, and connections that are left half open."""

from __future__ import annotations

import asyncio
import contextlib
import random

from tests.fuzz.tally import Tally
from tinsmith_gateway.serving.splice import PREFACE

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END_STREAM, _END_HEADERS = 1, 4
_MAX_FRAMES = 20
_READ_S = 0.2
_PATHS = [
    "/tinsmith.v1.SchedulerService/ListTrainingRuns",
    "/tinsmith.v1.TrainerService/ForwardBackward",
    "/tinsmith.v1.EnvironmentService/StepInstances",
    "/grpc.health.v1.Health/Check",
    "/nothing",
]


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame (RFC 9113, section 4.1)."""
    head = len(payload).to_bytes(3, "big") + bytes([kind & 255, flags & 255])
    return head + (stream & (2**32 - 1)).to_bytes(4, "big") + payload


def literal_headers(fields: list[tuple[str, str]]) -> bytes:
    """Return header fields without compression (RFC 7541, section 6.2.2)."""
    block = b""
    for name, value in fields:
        for text in (name, value):
            encoded = text.encode()
            block += (b"\x00" if text is name else b"") + _length(len(encoded)) + encoded
    return block


def _length(size: int) -> bytes:
    if size < 127:
        return bytes([size])
    size -= 127
    out = [127]
    while size >= 128:
        out.append(size % 128 + 128)
        size //= 128
    return bytes([*out, size])


def request_head(key: str, chance: random.Random) -> bytes:
    """Return the header fields of a call, most often good ones."""
    fields = [
        (":method", chance.choice(["POST"] * 9 + ["GET", ""])),
        (":scheme", "http"),
        (":path", chance.choice(_PATHS)),
        (":authority", "x"),
        ("content-type", chance.choice(["application/grpc"] * 9 + ["text/html", ""])),
        ("te", "trailers"),
    ]
    if chance.random() < 0.6:
        fields.append(("authorization", f"Bearer {key}"))
    if chance.random() < 0.2:
        fields.append(("grpc-timeout", chance.choice(["1S", "x", "99999999H", "-1S"])))
    if chance.random() < 0.2:
        fields.append(("grpc-encoding", chance.choice(["gzip", "x", "identity"])))
    if chance.random() < 0.1:
        fields.append((chance.choice(["X-Upper", "", ":path", "a" * 3000]), "x" * 500))
    if chance.random() < 0.2:
        chance.shuffle(fields)
    return literal_headers(fields)


def hostile_frame(key: str, chance: random.Random) -> bytes:
    """Return one frame: of a call, or of anything."""
    stream = chance.choice([1, 1, 1, 3, 5, 0, 2, 2**31 - 1])
    match chance.randrange(9):
        case 0 | 1:
            flags = chance.choice([_END_HEADERS] * 3 + [_END_HEADERS | _END_STREAM, 0])
            return frame(_HEADERS, flags, stream, request_head(key, chance))
        case 2 | 3:
            size = chance.choice([0, 5, 100, 2**26, 2**32 - 1])
            prefix = bytes([chance.choice([0, 0, 1, 7])]) + size.to_bytes(4, "big")
            body = prefix + chance.randbytes(chance.choice([0, 5, 100, 5000]))
            return frame(_DATA, chance.choice([0, _END_STREAM]), stream, body)
        case 4:
            return b"".join(frame(_RESET, 0, number, bytes(4)) for number in range(1, 200, 2))
        case 5:
            return frame(_PING, chance.choice([0, 1]), 0, bytes(8)) * chance.choice([1, 200])
        case 6:
            settings = chance.randbytes(6) * chance.choice([1, 3, 100])
            return frame(_SETTINGS, 0, 0, settings)
        case 7:
            number = chance.choice([0, 1, 2**31 - 1])
            return frame(_WINDOW, 0, chance.choice([0, stream]), number.to_bytes(4, "big"))
        case _:
            payload = chance.randbytes(chance.choice([0, 1, 6, 500]))
            kind = chance.choice([chance.randrange(256), _CONTINUATION])
            return frame(kind, chance.randrange(256), stream, payload)


async def send_frames(
    tally: Tally, host: str, port: int, key: str, number: int, chance: random.Random
) -> int:
    """Send frames on a connection of its own; return how many."""
    number = min(number, chance.randint(1, _MAX_FRAMES))
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        tally.fail(f"no connection: {error}")
        return number
    received = b""
    try:
        writer.write(PREFACE + (frame(_SETTINGS, 0, 0, b"") if chance.random() < 0.9 else b""))
        for _ in range(number):
            writer.write(hostile_frame(key, chance))
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_READ_S):
                await writer.drain()
                while chunk := await reader.read(65536):
                    received += chunk
    finally:
        writer.transport.abort()
    if b"Traceback" in received or b"INTERNAL" in received:
        tally.fail(f"frames were answered {received!r:.300}")
    tally.statuses["frames", "answered" if received else "cut"] += number
    return number


class HalfOpen:
    """Keeps connections that begin and do not go on; one that is cut is begun anew.

    Args:
        host: Of the gateway.
        port: Of it.
        number: How many there are.
        chance: Chooses how each begins.
    """

    def __init__(self, host: str, port: int, number: int, chance: random.Random) -> None:
        self._host, self._port = host, port
        self._chance = chance
        self._tasks = [asyncio.create_task(self._keep(index)) for index in range(number)]
        self.num_open = 0
        self.num_begun = 0

    async def close(self) -> None:
        """Close them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, index: int) -> None:
        # Not all in one moment: the listener's queue is finite.
        await asyncio.sleep(index / 500)
        while True:
            with contextlib.suppress(OSError):
                await self._hold()
            await asyncio.sleep(1.0 + self._chance.random())

    async def _hold(self) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        self.num_open += 1
        self.num_begun += 1
        try:
            writer.write(self._beginning())
            while await reader.read(65536):
                pass
        finally:
            self.num_open -= 1
            writer.transport.abort()

    def _beginning(self) -> bytes:
        settings = frame(_SETTINGS, 0, 0, b"")
        head = frame(_HEADERS, 0, 1, request_head("", self._chance))
        return self._chance.choice(
            [b"", PREFACE[:7], PREFACE, PREFACE + settings, PREFACE + settings + head, b"POST / H"]
        )
