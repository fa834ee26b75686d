"""The check in a key of users, which tells a key that was made here from a random one.

The last characters of a key are a short code of its id and secret, made with the root secret. A pod
that finds it right asks the scheduler about the key, however many unknown keys its address has
shown. Keys without it, or with that of an older root, are good as before: those are counted by
address. The secret that makes the codes opens nothing. A pod that does not know the root gets it
with the answer about its own key.

A code is derived as keys of pods are (`pod_identity`), so that a chart can compute it.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence

from tinsmith_runtime.rpc.pod_identity import derive_secret
from tinsmith_runtime.shielded import start

CHECK_LENGTH = 12
"""Hexadecimal digits of a check; a guess is right once in 2**48."""
_PURPOSE = "tinsmith key check"
_REFRESH_S = 60.0
"""How long a check that does not fit waits for another question about the secrets."""


def check_secret(root: str) -> str:
    """Return what makes the checks of a root secret."""
    return derive_secret(root, _PURPOSE)


def check_of(secret: str, key_id: str, secret_sha256: bytes) -> str:
    """Return the check of a key.

    Args:
        secret: What `check_secret` returned.
        key_id: Id of the key.
        secret_sha256: The SHA-256 of its secret.
    """
    return derive_secret(secret, f"{key_id}\n{secret_sha256.hex()}")[:CHECK_LENGTH]


class KeyChecks:
    """Tells checks that are right, by secrets that are asked for once and seldom again.

    Args:
        ask: Returns the secrets that are valid.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Sequence[str]]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._secrets: Sequence[str] = ()
        self._refresh_s = clock()
        self._asking: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def is_right(self, check: str, key_id: str, secret_sha256: bytes) -> bool:
        """Whether a key has a check that was made with a secret of this deployment.

        Raises:
            TinsmithError: If the secrets are not known yet, and could not be asked for.
        """
        if not check:
            return False
        if self._fits(check, key_id, secret_sha256):
            return True
        # The root may have been rotated. A flood asks no more often than one key does.
        if self._asking is None and self._clock() >= self._refresh_s:
            self._asking = start(self._learn(), self._running)
            self._asking.add_done_callback(self._forget_task)
        if self._asking is not None:
            await asyncio.shield(self._asking)
        return self._fits(check, key_id, secret_sha256)

    def _fits(self, check: str, key_id: str, secret_sha256: bytes) -> bool:
        return any(
            hmac.compare_digest(check_of(secret, key_id, secret_sha256), check)
            for secret in self._secrets
        )

    async def _learn(self) -> None:
        self._secrets = await self._ask()
        self._refresh_s = self._clock() + _REFRESH_S

    def _forget_task(self, _: object) -> None:
        self._asking = None
