"""How messages of a sampler and its vLLM process cross their socket: a head in JSON, bare numbers.

The types of the message classes say what a frame holds, and each end takes only messages for it.
What has another form is refused; nothing of a frame is run. The standard library is all that both
ends share. They are on one machine, so that numbers are in its order of bytes.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from tinsmith_sampler.vllm.messages import (
    Command,
    Event,
    LikeliestTokens,
    Stepped,
    Update,
    refusal_of,
)

MAX_FRAME_BYTES = 2**28
"""The scores of a prompt of 32,768 tokens take 2**19 bytes for each token that is listed."""
_MAX_HEAD_BYTES = 2**22
_LENGTH = struct.Struct(">Q")
_HEAD_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size
_NUMBER_BYTES = 8


class FrameError(ValueError):
    """Bytes that are no message for this end, or a message that no frame can hold."""


def to_frame(message: Command | Event) -> bytes:
    """Return a message as bytes, its length first.

    Raises:
        FrameError: If it is too long, or has values of other types than its class says.
    """
    name = type(message).__name__
    numbers = bytearray()
    try:
        head = json.dumps([name, _FORMS_BY_NAME[name].write(message, numbers)]).encode("ascii")
    except (AttributeError, TypeError, ValueError, OverflowError, struct.error) as error:
        raise FrameError(f"{name} has no frame: {error}") from error
    length = _HEAD_LENGTH.size + len(head) + len(numbers)
    _check_lengths(length, len(head))
    return b"".join((_LENGTH.pack(length), _HEAD_LENGTH.pack(len(head)), head, numbers))


def stepped_frames(updates: Sequence[Update]) -> Iterator[bytes]:
    """Yield the frames of what a step brought: one if they fit, else one for each completion.

    A completion that fits into none is refused by its own update.
    """
    try:
        yield to_frame(Stepped(list(updates)))
    except FrameError as error:
        if len(updates) == 1:
            yield to_frame(Stepped([refusal_of(updates[0].sample, str(error))]))
        else:
            for update in updates:
                yield from stepped_frames([update])


def length_of(start: bytes) -> int:
    """Return how many bytes follow the first ones of a frame.

    Raises:
        FrameError: If they are more than a frame may have.
    """
    (length,) = _LENGTH.unpack(start)
    _check_lengths(length, 0)
    return int(length)


def command_of(content: bytes) -> Command:
    """Return the command of a frame.

    Raises:
        FrameError: If it holds none.
    """
    return cast("Command", _message_of(content, _COMMANDS))


def event_of(content: bytes) -> Event:
    """Return the event of a frame.

    Raises:
        FrameError: If it holds none.
    """
    return cast("Event", _message_of(content, _EVENTS))


class _Numbers:
    """The numbers of a frame, read in order."""

    def __init__(self, content: memoryview) -> None:
        self._rest = content

    def take(self, kind: str, count: object) -> list[Any]:
        """Return the next ones; `q` are integers, `d` floats."""
        # Compared before anything is made of the size that a frame claims.
        if type(count) is not int or not 0 <= count * _NUMBER_BYTES <= len(self._rest):
            raise FrameError(f"{len(self._rest)} bytes are no {count!r} numbers")
        end = count * _NUMBER_BYTES
        taken, self._rest = self._rest[:end], self._rest[end:]
        return list(struct.unpack(f"={count}{kind}", taken))

    def require_end(self) -> None:
        if self._rest:
            raise FrameError(f"{len(self._rest)} bytes follow the last number")


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """How values of a type are written and read.

    Attributes:
        write: Returns what stands in the head for a value, and adds its numbers to the others.
        read: Returns the value that was written.
    """

    write: Callable[[Any, bytearray], Any]
    read: Callable[[Any, _Numbers], Any]


def _message_of(content: bytes, forms: dict[str, _Form]) -> Any:
    if len(content) < _HEAD_LENGTH.size:
        raise FrameError(f"{len(content)} bytes are no frame")
    (head_length,) = _HEAD_LENGTH.unpack_from(content)
    _check_lengths(len(content), head_length)
    begin = _HEAD_LENGTH.size + head_length
    if begin > len(content):
        raise FrameError(f"a head of {head_length} bytes in a frame of {len(content)}")
    try:
        head = json.loads(content[_HEAD_LENGTH.size : begin].decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the head is not JSON: {error}") from error
    match head:
        case [str(name), fields] if name in forms:
            numbers = _Numbers(memoryview(content)[begin:])
            message = forms[name].read(fields, numbers)
            numbers.require_end()
            return message
    raise FrameError(f"the head names none of {', '.join(forms)}")


def _check_lengths(length: int, head_length: int) -> None:
    if length > MAX_FRAME_BYTES or head_length > _MAX_HEAD_BYTES:
        raise FrameError(
            f"a frame of {length} bytes with a head of {head_length}; {MAX_FRAME_BYTES} and "
            f"{_MAX_HEAD_BYTES} are allowed"
        )


def _pack(kind: str, values: Sequence[Any], numbers: bytearray) -> None:
    numbers += struct.pack(f"={len(values)}{kind}", *values)


def _of_scalar(kind: type, convert: Callable[[Any], Any]) -> _Form:
    def read(value: Any, _: _Numbers) -> Any:
        # True is no integer here.
        if type(value) is not kind:
            raise FrameError(f"{type(value).__name__} stands where {kind.__name__} belongs")
        return value

    return _Form(lambda value, _: convert(value), read)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is no text")
    return value


def _of_numbers(kind: str) -> _Form:
    def write(values: Sequence[Any], numbers: bytearray) -> int:
        _pack(kind, values, numbers)
        return len(values)

    return _Form(write, lambda count, numbers: numbers.take(kind, count))


def _of_scores() -> _Form:
    """Numbers of which some are None, behind which of them are there."""

    def write(values: Sequence[float | None], numbers: bytearray) -> int:
        _pack("q", [value is not None for value in values], numbers)
        _pack("d", [0.0 if value is None else value for value in values], numbers)
        return len(values)

    def read(count: Any, numbers: _Numbers) -> list[float | None]:
        are_there = numbers.take("q", count)
        values = numbers.take("d", count)
        return [value if there else None for there, value in zip(are_there, values, strict=True)]

    return _Form(write, read)


def _of_rows(*, may_lack: bool) -> _Form:
    """Lists of likeliest tokens: their lengths, -1 for None, then all tokens, then all scores."""

    def write(rows: Sequence[LikeliestTokens | None], numbers: bytearray) -> int:
        _pack("q", [-1 if row is None else len(row) for row in rows], numbers)
        pairs = [pair for row in rows if row for pair in row]
        _pack("q", [token for token, _ in pairs], numbers)
        _pack("d", [score for _, score in pairs], numbers)
        return len(rows)

    def read(count: Any, numbers: _Numbers) -> list[LikeliestTokens | None]:
        lengths = numbers.take("q", count)
        if min(lengths, default=0) < (-1 if may_lack else 0):
            raise FrameError("a list has a length below zero")
        total = sum(length for length in lengths if length > 0)
        tokens, scores = numbers.take("q", total), numbers.take("d", total)
        pairs = zip(tokens, scores, strict=True)
        return [None if length < 0 else [next(pairs) for _ in range(length)] for length in lengths]

    return _Form(write, read)


def _of_list(each: _Form) -> _Form:
    def read(values: Any, numbers: _Numbers) -> list[Any]:
        if not isinstance(values, list):
            raise FrameError(f"{type(values).__name__} stands where a list belongs")
        return [each.read(value, numbers) for value in values]

    return _Form(lambda values, numbers: [each.write(one, numbers) for one in values], read)


def _optional(form: _Form) -> _Form:
    return _Form(
        lambda value, numbers: None if value is None else form.write(value, numbers),
        lambda value, numbers: None if value is None else form.read(value, numbers),
    )


def _of_class(of: type[Any]) -> _Form:
    """The fields of a class, in their order."""
    forms = {name: _form_of(hint) for name, hint in get_type_hints(of).items()}

    def write(message: Any, numbers: bytearray) -> list[Any]:
        return [form.write(getattr(message, name), numbers) for name, form in forms.items()]

    def read(values: Any, numbers: _Numbers) -> Any:
        if not isinstance(values, list) or len(values) != len(forms):
            raise FrameError(f"{of.__name__} has {len(forms)} fields")
        fields = zip(forms.items(), values, strict=True)
        return of(**{name: form.read(value, numbers) for (name, form), value in fields})

    return _Form(write, read)


def _form_of(hint: Any) -> _Form:
    if hint in _FORMS:
        return _FORMS[hint]
    if dataclasses.is_dataclass(hint):
        return _of_class(cast("type[Any]", hint))
    if get_origin(hint) is list:
        return _of_list(_form_of(get_args(hint)[0]))
    if get_origin(hint) is UnionType and get_args(hint)[1:] == (type(None),):
        return _optional(_form_of(get_args(hint)[0]))
    raise TypeError(f"no form is known for {hint}")


_FORMS: dict[Any, _Form] = {
    int: _of_scalar(int, operator.index),
    float: _of_scalar(float, float),
    str: _of_scalar(str, _text),
    list[int]: _of_numbers("q"),
    list[float]: _of_numbers("d"),
    list[float | None]: _of_scores(),
    list[LikeliestTokens]: _of_rows(may_lack=False),
    list[LikeliestTokens | None]: _of_rows(may_lack=True),
}
_COMMANDS = {each.__name__: _of_class(each) for each in get_args(Command)}
_EVENTS = {each.__name__: _of_class(each) for each in get_args(Event)}
_FORMS_BY_NAME = {**_COMMANDS, **_EVENTS}
