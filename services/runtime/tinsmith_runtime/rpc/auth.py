"""The caller of a call: its key, its project, and how a pod finds them out.

A key is `tsk_<id>_<secret>`, or the same spelled `tml-<id>_<secret>` for clients that insist on
that beginning; only the SHA-256 of the secret is stored. Keys that are made here end with a check
(`key_checks`). The tenant of a call comes from its key alone. The scheduler owns the keys; other
pods ask it (`CachingKeyVerifier`) and keep the answer for a few seconds, which bounds how long a
revoked key still works.

The caller of the current call is a context variable, set by the interceptor. So domain code needs
no transport type to learn the tenant.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

from tinsmith_runtime.errors import (
    KeyInvalidError,
    KeyMissingError,
    NotFoundError,
    RoleMissingError,
    UnauthenticatedError,
)
from tinsmith_runtime.rpc.key_checks import KeyChecks, check_of, check_secret
from tinsmith_runtime.rpc.key_lookups import Answers, FailureLimit
from tinsmith_runtime.rpc.peers import current_peer
from tinsmith_runtime.rpc.permissions import KeyRole, may_call
from tinsmith_runtime.rpc.pod_identity import (
    POD_KEY_PREFIX,
    PodIdentity,
    PodKey,
    PodRole,
    verify_pod_key,
)
from tinsmith_runtime.shielded import start
from tinsmith_runtime.tenant import bind_tenant

CHARGED_KEY_HEADER = "x-tinsmith-charged-key"
"""Says for which key of users a pod calls; of other callers it is not looked at."""

_KEY_ID = re.compile(r"[a-z0-9]{12}")
_KEY_PATTERN = re.compile(r"(?:tsk_|tml-)([a-z0-9]{12})_([A-Za-z0-9_-]{43})([0-9a-f]{12})?")
_SECRET_BYTES = 32
_KEY_ID_LENGTH = 12


@dataclass(frozen=True, slots=True)
class Caller:
    """The party behind a call."""

    project: str
    role: KeyRole | PodRole | None
    """What it may call; None for a caller without a key, which calls nothing."""
    key_id: str
    pool: str = ""
    """The workers that the key is bound to; empty for the shared ones."""
    on_behalf_of: str = ""
    """Id of the key of users for which a pod calls; empty if it calls for itself."""

    @classmethod
    def of_pod(cls, identity: PodIdentity) -> Caller:
        """Return the caller that a pod is."""
        return cls("", identity.role, identity.key_id, identity.pool)

    @property
    def is_pod(self) -> bool:
        """Whether the caller is another pod, which may act for any project."""
        return isinstance(self.role, PodRole)

    @property
    def tenant(self) -> str:
        """The party that shares the bounds of the call: all keys of a project."""
        return self.project or self.key_id

    @property
    def charged_key_id(self) -> str:
        """Id of the key whose usage a call is."""
        return self.on_behalf_of or self.key_id

    def calls_for(self, key_id: object) -> Caller:
        """Return the caller as one that works for a key of users, if it is a pod and names one."""
        if not self.is_pod or not isinstance(key_id, str) or _KEY_ID.fullmatch(key_id) is None:
            return self
        return replace(self, on_behalf_of=key_id)

    def require_method(self, method: str) -> None:
        """Raise `RoleMissingError` if the caller's role does not call a method.

        Args:
            method: Its full name, `/package.Service/Method`.
        """
        if self.role is None or not may_call(self.role, method):
            raise self.denied(method)

    def require_role(self, *roles: KeyRole) -> None:
        """Raise `RoleMissingError` unless the key has one of some roles."""
        if self.role not in roles:
            raise self.denied("this")

    def denied(self, what: str) -> RoleMissingError:
        """Return the error of a call that the caller's role does not allow."""
        return RoleMissingError(
            f"a key of the role {self.role} does not call {what}; use one whose role does",
            role=self.role or "",
            key_id=self.key_id,
        )

    def require_project(self, project: str, missing: Callable[[], NotFoundError]) -> None:
        """Raise `missing()` unless the caller belongs to a project.

        A foreign resource is reported as not found, so that names cannot be probed.
        """
        if not self.is_pod and self.project != project:
            raise missing()


_caller: ContextVar[Caller] = ContextVar("tinsmith_caller")


def current_caller() -> Caller:
    """Return the caller of the call that is being served.

    Raises:
        KeyMissingError: Outside of a served call.
    """
    caller = _caller.get(None)
    if caller is None:
        raise KeyMissingError("no caller: this code runs outside of a served call")
    return caller


def bind_caller(caller: Caller) -> None:
    """Set the caller of the current task; the interceptor does this for each call."""
    _caller.set(caller)
    bind_tenant(caller.project)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key split into its parts."""

    key_id: str
    secret: str
    check: str = ""
    """What `checked` gave it; empty in keys that were made elsewhere or by older releases."""

    @classmethod
    def generate(cls) -> ApiKey:
        """Draw a new key with 256 random bits."""
        return cls(secrets.token_hex(6), secrets.token_urlsafe(_SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> ApiKey:
        """Split a key, of either spelling.

        Raises:
            KeyInvalidError: If the text does not have the form of a key.
        """
        match = _KEY_PATTERN.fullmatch(text)
        if match is None:
            raise KeyInvalidError("the API key is malformed, it has not the form tsk_<id>_<secret>")
        return cls(match[1], match[2], match[3] or "")

    def checked(self, root: str) -> ApiKey:
        """Return the key with the check of a root secret."""
        check = check_of(check_secret(root), self.key_id, self.secret_sha256)
        return replace(self, check=check)

    @property
    def tinker_spelling(self) -> str:
        """The key as the public `tinker` client wants it to begin."""
        return f"tml-{self.key_id}_{self.secret}{self.check}"

    @property
    def secret_sha256(self) -> bytes:
        """What is stored instead of the secret."""
        return hashlib.sha256(self.secret.encode()).digest()

    def __str__(self) -> str:
        return f"tsk_{self.key_id}_{self.secret}{self.check}"

    def __repr__(self) -> str:
        return f"ApiKey({self.key_id!r}, <secret>)"


def derive_job_key(root: str, uid: str) -> ApiKey:
    """Return the key of a job, derived from the root secret: it is the same each time.

    So a controller that is killed at any point arrives at it again. Nothing secret has to be
    written down before the job's own Secret.

    Args:
        root: The root secret of the deployment.
        uid: Of the job; another job of the same name has another one.
    """

    def derived(what: str) -> bytes:
        text = f"tinsmith job key {what}\0{uid}"
        return hmac.new(root.encode(), text.encode(), hashlib.sha256).digest()

    secret = base64.urlsafe_b64encode(derived("secret")).decode().rstrip("=")
    return ApiKey(derived("id").hex()[:_KEY_ID_LENGTH], secret).checked(root)


class KeyVerifier(Protocol):
    """Finds the caller behind a key."""

    async def verify(self, key_id: str, secret_sha256: bytes, check: str = "") -> Caller:
        """Return the caller, or raise `KeyInvalidError` or `KeyRevokedError`.

        Args:
            key_id: Id of the key.
            secret_sha256: The SHA-256 of its secret.
            check: The check that the key ends with; no part of whether it is good.
        """
        ...


class Authenticator:
    """Turns the `authorization` value of a call into a caller.

    Args:
        verifier: Where user keys are known.
        roots: The root secrets that keys of pods are derived from; where there are none, the
            verifier is asked.
    """

    def __init__(self, verifier: KeyVerifier, *, roots: Sequence[str] = ()) -> None:
        self._verifier = verifier
        self._roots = tuple(roots)

    async def require_good(self, key_id: str) -> None:
        """Raise unless a key of users is still good, by which something was granted.

        Raises:
            UnauthenticatedError: If it was revoked, or has expired.
        """
        await self._verifier.verify(key_id, b"")

    async def authenticate(self, authorization: str | None) -> Caller:
        """Return the caller of a call.

        Args:
            authorization: `Bearer <key>`, or None if the call carries none.

        Raises:
            KeyMissingError: If there is no credential.
            KeyInvalidError: If it is malformed or unknown.
            KeyRevokedError: If it was revoked.
        """
        scheme, _, credential = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not credential:
            raise KeyMissingError(
                "the call carries no API key; send it as 'authorization: Bearer tsk_...'"
            )
        if credential.startswith(POD_KEY_PREFIX):
            pod = PodKey.parse(credential)
            if self._roots:
                identity = verify_pod_key(self._roots, pod.identity.key_id, pod.secret_sha256)
                return Caller.of_pod(identity)
            return await self._verifier.verify(pod.identity.key_id, pod.secret_sha256)
        key = ApiKey.parse(credential)
        return await self._verifier.verify(key.key_id, key.secret_sha256, key.check)


_Entry = tuple[str, bytes]


class CachingKeyVerifier:
    """Asks elsewhere and keeps each answer, good or bad, for `ttl_s` seconds.

    Good and bad answers are kept apart, so that a flood of unknown keys takes no good one away.

    Args:
        ask: The remote lookup; it raises `UnauthenticatedError` for a key that is no good.
        ttl_s: Lifetime of an answer, and so the longest time that a revoked key still works.
        clock: Monotonic seconds.
        max_entries: How many good answers are kept, and how many bad ones.
        failures: How many unknown keys without a right check an address may try.
        checks: Tells the checks that are right; without it none is.
    """

    def __init__(
        self,
        ask: Callable[[str, bytes], Awaitable[Caller]],
        *,
        checks: KeyChecks | None = None,
        ttl_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        max_entries: int = 10_000,
        failures: FailureLimit | None = None,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._failures = failures or FailureLimit(clock=clock)
        self._checks = checks
        self._good = Answers[_Entry, Caller](ttl_s=ttl_s, max_entries=max_entries, clock=clock)
        self._bad = Answers[_Entry, UnauthenticatedError](
            ttl_s=ttl_s, max_entries=max_entries, clock=clock
        )
        self._asking: dict[_Entry, asyncio.Task[Caller]] = {}
        self._running: set[asyncio.Task[Caller]] = set()

    async def verify(self, key_id: str, secret_sha256: bytes, check: str = "") -> Caller:
        """Return the caller behind a key; see `KeyVerifier`.

        Raises:
            RateLimitedError: If the address of the call has shown too many unknown keys.
        """
        entry = (key_id, secret_sha256)
        caller = self._good.get(entry)
        if caller is not None:
            return caller
        refusal = self._bad.get(entry)
        if refusal is not None:
            raise refusal
        # A key that was good before is no guess, and neither is one that was made here.
        is_guess = self._good.latest(entry) is None and not (
            self._checks is not None and await self._checks.is_right(check, *entry)
        )
        # One question for many calls that arrive together.
        task = self._asking.get(entry)
        if task is None:
            address = current_peer() if is_guess else None
            if address is not None:
                self._failures.take(address)
            task = start(self._ask_and_keep(entry, address), self._running)
            self._asking[entry] = task
            task.add_done_callback(lambda _: self._asking.pop(entry, None))
        return await asyncio.shield(task)

    async def _ask_and_keep(self, entry: _Entry, address: str | None) -> Caller:
        asked_s = self._clock()
        try:
            caller = await self._ask(*entry)
        except UnauthenticatedError as error:
            self._good.drop(entry)
            self._bad.keep(entry, error, asked_s)
            raise
        except BaseException:
            self._give_back(address)
            raise
        self._give_back(address)
        self._good.keep(entry, caller, asked_s)
        return caller

    def _give_back(self, address: str | None) -> None:
        if address is not None:
            self._failures.give_back(address)
