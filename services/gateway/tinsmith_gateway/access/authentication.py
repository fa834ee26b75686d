"""The caller of an HTTP request: an API key in either header, or the key of an episode.

A user's calls go on to the other pods with the user's own key, so that they decide what it may do.
The key of an episode is known to the coordinator alone: its calls go on with the key of the pods,
and are confined here to the sampling session of the episode.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from tinsmith.v1 import episode_pb2
from tinsmith_runtime.errors import KeyMissingError, PermissionDeniedError
from tinsmith_runtime.rpc.auth import CHARGED_KEY_HEADER, Authenticator, Caller
from tinsmith_runtime.rpc.peers import current_peer
from tinsmith_runtime.rpc.permissions import KeyRole
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole

EPISODE_KEY_PREFIX = "tse-"

Metadata = tuple[tuple[str, str], ...]
VerifyEpisodeKey = Callable[[str], Awaitable[tuple[episode_pb2.Episode, str]]]
"""Returns an episode and the pool of the coordinator that has it."""


@dataclass(frozen=True, slots=True)
class Credential:
    """The party behind a request, and what its calls to other pods carry.

    Attributes:
        caller: Project, role and key.
        metadata: What calls to other pods carry.
        key: The key as it was sent.
        episode: The episode of an episode's key; None for a user's.
    """

    caller: Caller
    metadata: Metadata = field(repr=False)
    key: str = field(repr=False)
    episode: episode_pb2.Episode | None = None

    @property
    def project(self) -> str:
        """Resource name of the project."""
        return f"projects/{self.caller.project}"

    def require_user(self) -> None:
        """Raise `PermissionDeniedError` for the key of an episode, which may only sample."""
        if self.episode is not None:
            raise PermissionDeniedError(
                "the key of an episode is for model calls alone; use an API key of the project",
            )


class Callers:
    """Finds the caller of an HTTP request.

    Args:
        authenticator: Knows the keys of users.
        credentials: Of the gateway.
        verify_episode_key: Asks the coordinator.
        on_known: Called with the address of a call whose key is good.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        credentials: PodCredentials,
        verify_episode_key: VerifyEpisodeKey,
        on_known: Callable[[str], None],
    ) -> None:
        self._authenticator = authenticator
        self._pods = credentials
        self._verify_episode_key = verify_episode_key
        self._on_known = on_known

    async def authenticate(self, headers: Mapping[str, str]) -> Credential:
        """Return the caller of a request.

        Args:
            headers: By lower-case name; `x-api-key: <key>`, `authorization: Bearer <key>`, or the
                key as the user name of Basic, for clients that are given a URL and nothing else.

        Raises:
            KeyMissingError: If there is no key.
            UnauthenticatedError: If it is no good.
            AbortedError: If it is of an episode whose lease ran out.
            FailedPreconditionError: If it is of an episode that has ended.
            RateLimitedError: If the address has shown too many unknown keys.
        """
        credential = await self._find(headers)
        self._on_known(current_peer())
        return credential

    async def require_good(self, key_id: str) -> None:
        """Raise unless a key of users is still good, by which something was granted.

        Raises:
            UnauthenticatedError: If it was revoked, or has expired.
        """
        await self._authenticator.require_good(key_id)

    async def _find(self, headers: Mapping[str, str]) -> Credential:
        key = headers.get("x-api-key", "") or _authorized_key(headers.get("authorization", ""))
        if not key:
            raise KeyMissingError(
                "the request carries no API key; send it as 'X-API-Key: tml-...' or "
                "'Authorization: Bearer tsk_...'"
            )
        if key.startswith(EPISODE_KEY_PREFIX):
            episode, pool = await self._verify_episode_key(key)
            project, episode_id = episode.name.split("/")[1], episode.name.split("/")[3]
            caller = Caller(project, KeyRole.AGENT, f"episode-{episode_id}", pool)
            return Credential(caller, self._pods.metadata, key, episode)
        caller = await self._authenticator.authenticate(f"Bearer {key}")
        if caller.is_pod:
            # The key of the pods would act for every project.
            raise PermissionDeniedError("the key of the pods is not for clients")
        return Credential(caller, _bearer(key), key)

    def for_pods(self, project: str, pool: str = "", *, charged_key: str = "") -> Credential:
        """Return what work of the gateway itself carries, on behalf of a project or pool.

        Args:
            project: Id of the project.
            pool: Id of the pool.
            charged_key: Id of the key whose usage it is; empty if it is not known.
        """
        charged = ((CHARGED_KEY_HEADER, charged_key),) if charged_key else ()
        return Credential(
            Caller(project, PodRole.GATEWAY, self._pods.key.identity.key_id, pool),
            (*self._pods.metadata, *charged),
            str(self._pods.key),
        )


def _authorized_key(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip()
        case "basic":
            try:
                pair = base64.b64decode(value.strip(), validate=True).decode("ascii")
            except ValueError:
                return ""
            return pair.partition(":")[0]
    return ""


def _bearer(key: str) -> Metadata:
    return (("authorization", f"Bearer {key}"),)
