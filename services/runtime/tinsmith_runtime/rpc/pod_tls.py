"""TLS between pods: each shows a certificate of its role, and asks for that of the other side.

The certificates are files, written by cert-manager or by `tinsmith certificates`. Those of all pods
come from one authority, which vouches for nothing else. A certificate names its role twice: as the
host `<role>.tinsmith`, which a caller expects of the pod that it reaches, at whatever address; and
as `spiffe://tinsmith/ns/<namespace>/role/<role>`, which a pod holds against the key of its caller.

Files that change are read again. A server reads them at the next handshake. A channel is replaced
by the next call after at most ten seconds, and the old one ends its calls. A file that cannot be
read leaves what was read before in use, and says so in the log.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tinsmith.rpc.channels import CHANNEL_OPTIONS, serialize_deterministically
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.observability.certificates import note_certificate

logger = logging.getLogger(__name__)

_OLD_CALLS_S = 300.0
"""Time that calls on a replaced channel get to finish."""
_IDENTITY = re.compile(r"spiffe://tinsmith/ns/([a-z0-9.-]*)/role/([a-z]+)")
_SAN = "x509_subject_alternative_name"

_Files = tuple[bytes, bytes, bytes]


def host_of(role: str) -> str:
    """Return the host that the certificate of a role names."""
    return f"{role}.tinsmith"


def identity_uri(role: str, namespace: str) -> str:
    """Return the URI that the certificate of a pod names."""
    return f"spiffe://tinsmith/ns/{namespace}/role/{role}"


@dataclass(frozen=True, slots=True)
class PodTls:
    """The certificate of a pod and the authority of all pods, as PEM files.

    Attributes:
        certificate: The certificate, followed by those between it and the authority.
        key: Its private key.
        authority: Certificates of the authorities that are trusted.
        look_s: How often an open channel looks whether the files have changed.
    """

    certificate: Path
    key: Path
    authority: Path
    look_s: float = 10.0

    @classmethod
    def from_settings(
        cls, certificate: Path | None, key: Path | None, authority: Path | None
    ) -> PodTls | None:
        """Return what the settings of a pod say; None if they name no file.

        Raises:
            ConfigError: If they name some of the files only.
        """
        if certificate is None and key is None and authority is None:
            return None
        if certificate is None or key is None or authority is None:
            raise ConfigError(
                "pod_certificate, pod_certificate_key and pod_authority belong together: set all "
                "or none"
            )
        return cls(certificate, key, authority)

    def read(self) -> _Files:
        """Return key, certificate and authority.

        Raises:
            OSError: If one cannot be read, or the key is not that of the certificate, as while only
                one of them has been replaced.
        """
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        return self.key.read_bytes(), self.certificate.read_bytes(), self.authority.read_bytes()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials that ask callers for a certificate, and follow the files.

        Raises:
            ConfigError: If a file cannot be read.
        """
        current = _Watched(self)

        def configure(files: _Files) -> grpc.ServerCertificateConfiguration:
            key, certificate, authority = files
            return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            # Called by a thread of gRPC at each handshake; None keeps what it has.
            return configure(current.files) if current.look() else None

        return grpc.dynamic_ssl_server_credentials(
            configure(current.files),
            fetch,  # type: ignore[arg-type]
            require_client_authentication=True,
        )

    def open_channel(self, address: str, role: str) -> grpc.aio.Channel:
        """Return a channel to a pod of a role; it follows the files.

        Raises:
            ConfigError: If a file cannot be read.
        """
        return _FollowingChannel(
            self, functools.partial(_open, grpc.aio.secure_channel, address, role), _close_later
        )  # type: ignore[return-value]

    def open_blocking_channel(self, address: str, role: str) -> grpc.Channel:
        """Return the same for code without an event loop."""
        return _FollowingChannel(
            self, functools.partial(_open, grpc.secure_channel, address, role), _Closer()
        )  # type: ignore[return-value]


def peer_identity(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, str] | None:
    """Return role and namespace of the pod that a connection is of; None without TLS.

    A certificate that names no role has the empty one, which no pod has.
    """
    names = context.auth_context().get(_SAN)
    if names is None:
        return None
    for name in names:
        match = _IDENTITY.fullmatch(name.decode(errors="replace"))
        if match is not None:
            return match[2], match[1]
    return "", ""


class _Watched:
    """The files as they were read last.

    Args:
        tls: Where they are.
    """

    def __init__(self, tls: PodTls) -> None:
        self._tls = tls
        try:
            self.files = tls.read()
            self._note()
        except OSError as error:
            raise ConfigError(
                f"a certificate of the pods cannot be read: {error}; is the Secret mounted?"
            ) from error

    def look(self) -> bool:
        """Read them again; return whether they have changed."""
        try:
            files = self._tls.read()
        except OSError as error:
            logger.warning("a certificate cannot be read", extra={"problem": str(error)})
            return False
        is_new = files != self.files
        self.files = files
        if is_new:
            self._note()
        return is_new

    def _note(self) -> None:
        note_certificate("pods", self.files[1].decode())


def _open(opener: Callable[..., Any], address: str, role: str, files: _Files) -> Any:
    key, certificate, authority = files
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    # The address is that of a pod, which no certificate names.
    options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", host_of(role)))
    return serialize_deterministically(opener(address, credentials, options=options))


class _FollowingChannel:
    """A channel that is opened anew when the files have changed.

    Args:
        tls: The files.
        open_: Opens a channel with what was read.
        close_old: Called with a channel that was replaced.
    """

    def __init__(
        self, tls: PodTls, open_: Callable[[_Files], Any], close_old: Callable[[Any], None]
    ) -> None:
        self._watched = _Watched(tls)
        self._look_s = tls.look_s
        self._open = open_
        self._close_old = close_old
        self._channel = open_(self._watched.files)
        self._looked_s = time.monotonic()
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            setattr(self, kind, functools.partial(_FollowingCall, self, kind))

    def current(self) -> Any:
        """Return the channel that calls take now."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= self._look_s:
            self._looked_s = now_s
            if self._watched.look():
                old, self._channel = self._channel, self._open(self._watched.files)
                self._close_old(old)
        return self._channel

    def close(self, *arguments: Any) -> Any:
        """Close the channel; to be awaited if it is one of an event loop."""
        return self._channel.close(*arguments)


class _FollowingCall:
    """A method on whatever channel its owner has."""

    def __init__(
        self, owner: _FollowingChannel, kind: str, *arguments: Any, **options: Any
    ) -> None:
        self._owner = owner
        self._make: Callable[[Any], Any] = lambda channel: getattr(channel, kind)(
            *arguments, **options
        )
        self._channel: Any = None
        self._call: Any = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        channel = self._owner.current()
        if channel is not self._channel:
            self._channel, self._call = channel, self._make(channel)
        return self._call(*arguments, **options)


_closing: set[asyncio.Task[None]] = set()


def _close_later(channel: grpc.aio.Channel) -> None:
    task = asyncio.get_running_loop().create_task(channel.close(_OLD_CALLS_S))
    _closing.add(task)
    task.add_done_callback(_closing.discard)


class _Closer:
    """Closes a replaced channel when the next one is: its calls had the time between."""

    def __init__(self) -> None:
        self._old: Any = None

    def __call__(self, channel: Any) -> None:
        if self._old is not None:
            self._old.close()
        self._old = channel
