"""Times and time spans on the wire."""

from __future__ import annotations

import datetime

from google.protobuf import duration_pb2, timestamp_pb2


def encode_duration(seconds: float) -> duration_pb2.Duration:
    """Return the message of a time span."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def encode_optional_duration(seconds: float | None) -> duration_pb2.Duration | None:
    """Return the message of a time span; None leaves it to the server."""
    return None if seconds is None else encode_duration(seconds)


def decode_duration(message: duration_pb2.Duration) -> float:
    """Return a time span in seconds; takes values beyond the range that protobuf checks."""
    return message.seconds + message.nanos / 1e9


def encode_optional_time(time: datetime.datetime | None) -> timestamp_pb2.Timestamp | None:
    """Return the message of a time; None leaves it to the server."""
    if time is None:
        return None
    message = timestamp_pb2.Timestamp()
    message.FromDatetime(time.astimezone(datetime.UTC))
    return message
