"""Native calls that are wrong on purpose: every method of the contract, with and without a key."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default
from grpc_status import rpc_status

from tests.fuzz import batches
from tests.fuzz.tally import Tally
from tinsmith_gateway.proxy.proxied_methods import METHODS, Method
from tinsmith_runtime.rpc.auth import ApiKey

_NUMBERS = [0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31)]
_LARGE_NUMBERS = [*_NUMBERS, 2**32, 2**63 - 1, -(2**63)]
_FLOATS = [0.0, 1.0, -1.0, 1e-4, float("nan"), float("inf"), -float("inf"), 3e38]
_TEXTS = [
    *("", "x", "-", "*", "a/b", "../..", "projects/-", "projects/default", "\u0000", "é\U0001f9e8"),
    *("x" * 300, "x" * 70_000, "{}", "null", '{"a":' * 100, "<|im_end|>", "%s%n", "'; --"),
]
_MAX_DEPTH, _MAX_READS = 5, 5
_UNKNOWN_METHODS = [
    *("/", "//", "/tinsmith.v1.TrainerService/", "/tinsmith.v1.TrainerService/Nothing"),
    *("/tinsmith.v1.TrainerControlService/AdoptRun", "/grpc.health.v1.Health/Check"),
    *("/grpc.health.v1.Health/List", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
]
_MUST_NOT = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})
# What the client's own library says if it sends while the server has ended the call.
_ENDED_EARLY = "Internal error from Core"
_SIZES = ("larger than max", "metadata size exceeds")
# gRPC ends calls by itself at the client's deadline, and refuses large messages and headers.
_UNTYPED = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


class Calls:
    """Sends hostile calls.

    Args:
        address: Of the gateway.
        key: A good one, of a project of its own.
        names: Of resources of that project, and of others.
    """

    def __init__(self, address: str, key: str, names: list[str]) -> None:
        self._key = key
        self._names = names
        self._methods = list(METHODS.values())
        self._channel = grpc.aio.insecure_channel(address)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def send(self, tally: Tally, chance: random.Random) -> None:
        """Send one call, and look at how it ends."""
        if chance.random() < 0.03:
            await self._send_unknown(tally, chance)
            return
        method = chance.choice(self._methods)
        body = self._body(method, chance)
        await self._call(tally, method.path, method, body, chance)

    async def _send_unknown(self, tally: Tally, chance: random.Random) -> None:
        path = chance.choice(_UNKNOWN_METHODS)
        await self._call(tally, path, None, chance.randbytes(chance.randint(0, 200)), chance)

    async def _call(
        self,
        tally: Tally,
        path: str,
        method: Method | None,
        body: bytes,
        chance: random.Random,
    ) -> None:
        options: dict[str, Any] = {
            "metadata": self._metadata(chance),
            "timeout": chance.choice([0.05, 1.0, 1.0, 5.0]),
        }
        if chance.random() < 0.03:
            options["compression"] = chance.choice(
                [grpc.Compression.Gzip, grpc.Compression.Deflate]
            )
        try:
            if method is not None and (method.streams_requests or method.streams_responses):
                await self._stream(path, [body] * chance.randint(0, 3), options)
            else:
                unary: Any = self._channel.unary_unary(path)
                await unary(body, **options)
        except grpc.aio.AioRpcError as error:
            self._look(tally, path, body, error)
        else:
            tally.count("native", "OK")

    async def _stream(self, path: str, bodies: list[bytes], options: dict[str, Any]) -> None:
        async def requests() -> AsyncIterator[bytes]:
            for body in bodies:
                yield body

        stream: Any = self._channel.stream_stream(path)
        call = stream(requests(), **options)
        for _ in range(_MAX_READS):
            if await call.read() is grpc.aio.EOF:
                return
        call.cancel()

    def _look(self, tally: Tally, path: str, body: bytes, error: grpc.aio.AioRpcError) -> None:
        code = error.code()
        if error.details() == _ENDED_EARLY:
            tally.count("native", "ended early")
            return
        tally.count("native", code.name)
        details = error.details() or ""
        shown = f"{path} {body!r:.300} -> {code.name} {details:.300}"
        if code in _MUST_NOT or "Traceback" in details or 'File "' in details:
            tally.fail(shown)
            return
        is_typed = rpc_status.from_call(error) is not None
        is_too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and any(
            size in details for size in _SIZES
        )
        is_health = path.startswith("/grpc.")
        if not (is_typed or code in _UNTYPED or is_too_large or is_health):
            tally.fail(f"untyped: {shown}")

    def _metadata(self, chance: random.Random) -> list[tuple[str, str | bytes]]:
        metadata: list[tuple[str, str | bytes]] = []
        draw = chance.random()
        if draw < 0.75:
            metadata.append(("authorization", f"Bearer {self._key}"))
        elif draw < 0.8:
            metadata.append(("authorization", f"Bearer {ApiKey.generate()}"))
        elif draw < 0.85:
            metadata.append(("authorization", chance.choice(["", "Bearer", "Basic x", "x" * 5000])))
        if chance.random() < 0.05:
            metadata.append(("x-tinsmith-x", "a" * chance.choice([1, 3000])))
        if chance.random() < 0.05:
            metadata.append(("traceparent", chance.choice(["x", "00-" + "0" * 32 + "-x-00"])))
        if chance.random() < 0.02:
            metadata.append(("x-bin", chance.randbytes(20)))
        return metadata

    def _body(self, method: Method, chance: random.Random) -> bytes:
        service, _, name = method.path[1:].rpartition("/")
        described = Default().FindServiceByName(service).methods_by_name[name].input_type
        body: bytes = self.message(described, chance).SerializePartialToString()
        if chance.random() < 0.3:
            body = batches.damaged_bytes(body, chance)
        return body

    def message(self, described: Descriptor, chance: random.Random, depth: int = 0) -> Any:
        """Return a message with fields that are likely not what was asked for."""
        message = message_factory.GetMessageClass(described)()
        for field in described.fields:
            is_name = depth == 0 and field.number == 1
            if chance.random() < (0.05 if is_name else 0.45):
                continue
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                self._fill_message(message, field, chance, depth)
            elif field.is_repeated:
                values = [self._value(field, chance) for _ in range(chance.choice([0, 1, 2, 30]))]
                getattr(message, field.name).extend(values)
            else:
                setattr(message, field.name, self._value(field, chance))
        return message

    def _fill_message(
        self, message: Any, field: FieldDescriptor, chance: random.Random, depth: int
    ) -> None:
        if depth >= _MAX_DEPTH:
            return
        inner = field.message_type
        assert inner is not None
        if inner.GetOptions().map_entry:
            value = inner.fields_by_name["value"]
            for _ in range(chance.choice([0, 1, 3])):
                key = self._value(inner.fields_by_name["key"], chance)
                entries = getattr(message, field.name)
                if value.type == FieldDescriptor.TYPE_MESSAGE:
                    assert value.message_type is not None
                    entries[key].CopyFrom(self.message(value.message_type, chance, depth + 1))
                else:
                    entries[key] = self._value(value, chance)
        elif field.is_repeated:
            for _ in range(chance.choice([0, 1, 2])):
                getattr(message, field.name).add().CopyFrom(self.message(inner, chance, depth + 1))
        else:
            getattr(message, field.name).CopyFrom(self.message(inner, chance, depth + 1))

    def _value(self, field: FieldDescriptor, chance: random.Random) -> Any:
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return chance.randbytes(chance.choice([0, 1, 4, 8, 40, 4000]))
            case FieldDescriptor.CPPTYPE_STRING:
                return chance.choice(self._names if chance.random() < 0.6 else _TEXTS)
            case FieldDescriptor.CPPTYPE_BOOL:
                return chance.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return chance.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_ENUM:
                return chance.choice(_NUMBERS)
            case FieldDescriptor.CPPTYPE_INT64:
                return chance.choice(_LARGE_NUMBERS)
            case FieldDescriptor.CPPTYPE_UINT32:
                return abs(chance.choice(_NUMBERS[:-1]))
            case _:
                return abs(chance.choice(_LARGE_NUMBERS[:-1]))
