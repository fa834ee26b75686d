"""What proves an attempt: the token of its lease, and its key for model calls.

Both are made of the id of the claiming request, which only its sender knows, and a salt of the
attempt: a repeated claim gets the same ones, after a restart too, although the database holds
nothing but the salt and hashes. The request id is kept as a hash as well: a reader of the
database can neither make the secrets nor repeat the claim.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass, field

from tinsmith_runtime.errors import KeyInvalidError, LeaseLostError

_SECRET = r"[A-Za-z0-9_-]{43}"
_TOKEN_PATTERN = re.compile(rf"tsl-([1-9][0-9]{{0,5}})-({_SECRET})")
_KEY_PATTERN = re.compile(rf"tse-([0-9a-f]{{24}})-([1-9][0-9]{{0,5}})-({_SECRET})")


@dataclass(frozen=True, slots=True)
class LeaseToken:
    """The token of a lease, `tsl-<attempt>-<secret>`."""

    attempt: int
    secret: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> LeaseToken:
        """Split a token.

        Raises:
            LeaseLostError: If no such token was ever given out.
        """
        match = _TOKEN_PATTERN.fullmatch(text)
        if match is None:
            raise LeaseLostError("lease_token is not one of this service; claim an episode")
        return cls(int(match[1]), match[2])

    def __str__(self) -> str:
        return f"tsl-{self.attempt}-{self.secret}"


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """The key for the model calls of an attempt, `tse-<episode>-<attempt>-<secret>`."""

    episode_id: str
    attempt: int
    secret: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> EpisodeKey:
        """Split a key.

        Raises:
            KeyInvalidError: If the text does not have the form of a key.
        """
        match = _KEY_PATTERN.fullmatch(text)
        if match is None:
            raise KeyInvalidError(
                "the key is no key of an episode; it has the form tse-<episode>-<attempt>-<secret>"
            )
        return cls(match[1], int(match[2]), match[3])

    def __str__(self) -> str:
        return f"tse-{self.episode_id}-{self.attempt}-{self.secret}"


def derive_secret(salt: bytes, request_id: str, purpose: str) -> str:
    """Return a secret of an attempt: 256 bits, as 43 characters.

    Args:
        salt: Random bytes of the attempt.
        request_id: Of the claim.
        purpose: `lease` or `key`.
    """
    digest = hmac.new(salt, f"{purpose}\0{request_id}".encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def hash_secret(secret: str) -> bytes:
    """Return what is stored instead of a secret."""
    return hashlib.sha256(secret.encode()).digest()


def matches(secret: str, stored_sha256: bytes) -> bool:
    """Return whether a secret is the one whose hash is stored."""
    return hmac.compare_digest(hash_secret(secret), stored_sha256)
