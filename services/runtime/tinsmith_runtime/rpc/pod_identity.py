"""The identity of a pod: its key names its role, its namespace and its pool.

The operators hold one root secret for a deployment. The key of a pod is derived from it and from
what the pod may be, `tsp_<role>_<namespace>_<pool>_<secret>`. So a key that is stolen from one
namespace opens neither another role nor another pool, and the root is never sent. Those with the
root (scheduler, controller) recompute a key to verify it; other pods ask the scheduler.

The derivation hashes twice, `SHA-256(root, SHA-256(root, identity))`, with fixed separators. The
outer hash closes the extension of the inner one, and a chart can compute it, which has no HMAC. Two
roots are valid at a time while the root is rotated.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio

from tinsmith.rpc.channels import CHANNEL_OPTIONS, open_channel
from tinsmith_runtime.errors import ConfigError, KeyInvalidError
from tinsmith_runtime.rpc.pod_tls import PodTls

POD_KEY_PREFIX = "tsp_"

_NAME = re.compile(r"[a-z0-9.-]*")
_KEY = re.compile(r"(tsp_([a-z]+)_([a-z0-9.-]*)_([a-z0-9.-]*))_([0-9a-f]{64})")
_KEY_ID = re.compile(r"tsp_([a-z]+)_([a-z0-9.-]*)_([a-z0-9.-]*)")
_PURPOSE = "tinsmith pod key"


class PodRole(enum.StrEnum):
    """What a pod is."""

    SCHEDULER = "scheduler"
    TRAINER = "trainer"
    SAMPLER = "sampler"
    ENVIRONMENT = "environment"
    COORDINATOR = "coordinator"
    GATEWAY = "gateway"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """What a pod key stands for.

    Attributes:
        role: What the pod is.
        namespace: The namespace that it runs in; empty outside of a cluster.
        pool: The pool that it may register in; empty is the shared one.
    """

    role: PodRole
    namespace: str = ""
    pool: str = ""

    def __post_init__(self) -> None:
        for name, value in (("namespace", self.namespace), ("pool", self.pool)):
            if not _NAME.fullmatch(value):
                raise ConfigError(
                    f"{name} {value!r} cannot stand in the key of a pod; use lower-case letters, "
                    "digits, dots and dashes"
                )

    @classmethod
    def parse(cls, key_id: str) -> PodIdentity:
        """Return the identity that the public part of a key names.

        Raises:
            KeyInvalidError: If the text does not have its form, or names no role.
        """
        match = _KEY_ID.fullmatch(key_id)
        if match is None or match[1] not in set(PodRole):
            raise KeyInvalidError("the key of the pod is malformed")
        return cls(PodRole(match[1]), match[2], match[3])

    @property
    def key_id(self) -> str:
        """The public part of the key."""
        return f"{POD_KEY_PREFIX}{self.role}_{self.namespace}_{self.pool}"


@dataclass(frozen=True, slots=True)
class PodKey:
    """The key of a pod.

    Attributes:
        identity: What it stands for.
        secret: 64 hexadecimal digits.
    """

    identity: PodIdentity
    secret: str = field(repr=False)

    @classmethod
    def derive(cls, root: str, identity: PodIdentity) -> PodKey:
        """Return the key of an identity under a root secret."""
        return cls(identity, derive_secret(root, f"{_PURPOSE}\n{identity.key_id}"))

    @classmethod
    def parse(cls, text: str) -> PodKey:
        """Split a key.

        Raises:
            KeyInvalidError: If the text does not have the form of a key of a pod.
        """
        match = _KEY.fullmatch(text)
        if match is None:
            raise KeyInvalidError("the key of the pod is malformed")
        return cls(PodIdentity.parse(match[1]), match[5])

    @property
    def secret_sha256(self) -> bytes:
        """What the scheduler is shown instead of the secret."""
        return hashlib.sha256(self.secret.encode()).digest()

    def __str__(self) -> str:
        return f"{self.identity.key_id}_{self.secret}"


@dataclass(frozen=True, slots=True)
class PodCredentials:
    """What a pod shows to others, and verifies others by.

    Attributes:
        key: Its own key.
        roots: Root secrets, the one in use first; empty in a pod that was given its key alone.
        tls: Its certificate; None where pods speak in clear.
    """

    key: PodKey
    roots: tuple[str, ...] = field(default=(), repr=False)
    tls: PodTls | None = None

    @classmethod
    def read(
        cls,
        pod_key: str,
        role: PodRole,
        *,
        pool: str = "",
        previous: str = "",
        tls: PodTls | None = None,
    ) -> PodCredentials:
        """Return the credentials that the settings of a pod give it.

        Args:
            pod_key: The pod's own key, or the root secret, from which its key is derived then.
            role: What the pod is.
            pool: The pool that it registers in.
            previous: The root secret before the last rotation, which is valid too.
            tls: The pod's certificate.

        Raises:
            ConfigError: If the key is of another role or pool, or is none.
        """
        if not pod_key.startswith(POD_KEY_PREFIX):
            roots = tuple(root for root in (pod_key, previous) if root)
            return cls(PodKey.derive(pod_key, PodIdentity(role, pool=pool)), roots, tls)
        try:
            key = PodKey.parse(pod_key)
        except KeyInvalidError as error:
            raise ConfigError(
                "pod_key begins like the key of a pod but is none; copy it whole from the Secret"
            ) from error
        if (key.identity.role, key.identity.pool) != (role, pool):
            raise ConfigError(
                f"pod_key is that of a {key.identity.role} of pool {key.identity.pool!r}, and this "
                f"is a {role} of pool {pool!r}; give each pod its own key"
            )
        return cls(key, tls=tls)

    def open_channel(self, address: str, role: PodRole) -> grpc.aio.Channel:
        """Return a channel to a pod of a role.

        Args:
            address: `host:port`.
            role: What the pod there has to be, where it shows a certificate.
        """
        if self.tls is None:
            return open_channel(address)
        return self.tls.open_channel(address, role)

    def open_blocking_channel(self, address: str, role: PodRole) -> grpc.Channel:
        """Return the same for code without an event loop."""
        if self.tls is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return self.tls.open_blocking_channel(address, role)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The credential as metadata of a call."""
        return (("authorization", f"Bearer {self.key}"),)


def verify_pod_key(roots: Sequence[str], key_id: str, secret_sha256: bytes) -> PodIdentity:
    """Return the identity behind a key.

    Args:
        roots: The root secrets that are valid.
        key_id: Its public part.
        secret_sha256: The SHA-256 of its secret part.

    Raises:
        KeyInvalidError: If no root derives the key.
    """
    identity = PodIdentity.parse(key_id)
    expected = [PodKey.derive(root, identity).secret_sha256 for root in roots]
    if not any(hmac.compare_digest(each, secret_sha256) for each in expected):
        raise KeyInvalidError("the key of the pod was not made by this deployment's root secret")
    return identity


def derive_secret(root: str, text: str) -> str:
    """Return what a root secret makes of a text, 64 hexadecimal digits; see the module."""
    inner = _sha256(f"{root}\n{text}")
    return _sha256(f"{root}\n{inner}")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
