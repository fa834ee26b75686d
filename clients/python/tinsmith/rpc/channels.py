"""Channels: the one place where a client or a pod says how it reaches a server.

Requests are serialised deterministically. A server tells a repeated request from another one by its
bytes, and protobuf otherwise leaves the order of map entries open. Deterministic output is stable
within one release of protobuf, not between releases.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import Message

from tinsmith.addresses import is_near
from tinsmith.rpc.traced_calls import TracedMethod
from tinsmith.tracing import spans

MAX_MESSAGE_BYTES = 64 * 2**20
"""Limit of one request or answer."""
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A process that is stopped or cut off is found out while a call waits for it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The keepalive only says how long acknowledgements of the kernel may take; this is the answer.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted pod is found at once; the default backs off to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Retries are ours: they keep the request id and read the address again.
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # Pods reach each other directly, whatever proxy the machine has for the internet.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(
    address: str,
    root_certificates: bytes | None = None,
    *,
    begins_traces: bool = False,
    may_use_proxy: bool = False,
) -> grpc.aio.Channel:
    """Return a channel to a server.

    Args:
        address: `host:port`; `https://host:port` for TLS.
        root_certificates: PEM of the authorities that are trusted; None takes gRPC's own list.
        begins_traces: Whether calls that are part of no trace begin one, as those of clients do.
        may_use_proxy: Whether a server that is far is reached through the proxy that variables
            name, as those of clients are; one of this machine or of the cluster never is.
    """
    uses_proxy = may_use_proxy and not is_near(address)
    options = (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 1)) if uses_proxy else CHANNEL_OPTIONS
    if address.startswith("https://"):
        channel = grpc.aio.secure_channel(
            address.removeprefix("https://"),
            grpc.ssl_channel_credentials(root_certificates),
            options=options,
        )
    else:
        channel = grpc.aio.insecure_channel(address, options=options)
    return serialize_deterministically(channel, begins_traces=begins_traces)


def serialize_deterministically(
    channel: grpc.aio.Channel, *, begins_traces: bool = False
) -> grpc.aio.Channel:
    """Return a channel whose stubs write a message to the same bytes each time."""
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, kind, _with_serializer(getattr(channel, kind), begins_traces))
    return channel


def _with_serializer(make_call: Any, begins_traces: bool) -> Any:
    def make(method: str, request_serializer: Any = None, *args: Any, **kwargs: Any) -> Any:
        # None sends bytes as they are, as a proxy does.
        encode = None if request_serializer is None else _serialize
        call = make_call(method, encode, *args, **kwargs)
        return TracedMethod(call, method, begins=begins_traces) if spans.is_on() else call

    return make


def _serialize(message: Message) -> bytes:
    encoded: bytes = message.SerializeToString(deterministic=True)
    return encoded
