"""The part of `Client` that concerns API keys.

All of it needs a key of the scope `admin`, but to revoke the key that the client itself uses.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tinsmith.keys import calls
from tinsmith.types import ApiKey, NewApiKey

if TYPE_CHECKING:
    from tinsmith.rpc.core import ClientCore

T = TypeVar("T")


class KeyCalls:
    """Methods on keys; the project is that of the client unless told otherwise."""

    _core: ClientCore

    def create_key(
        self, *, scopes: Sequence[str] = ("user",), display_name: str = "", project: str = ""
    ) -> NewApiKey:
        """Create a key, and its project with the first one.

        Args:
            scopes: What it may do: `user`, `admin`.
            display_name: What it is for, for people.
            project: Id of another project, whose keys operators may manage.

        Returns:
            The key with its secret, which is not kept anywhere.
        """
        return self._call(
            calls.create_key(self._core, project=project, scopes=scopes, display_name=display_name)
        )

    async def create_key_async(
        self, *, scopes: Sequence[str] = ("user",), display_name: str = "", project: str = ""
    ) -> NewApiKey:
        """Do as `create_key`, in the caller's event loop."""
        return await self._acall(
            calls.create_key(self._core, project=project, scopes=scopes, display_name=display_name)
        )

    def list_keys(self, *, project: str = "") -> list[ApiKey]:
        """Return the keys of a project, newest first, those that were revoked included."""
        return self._call(calls.list_keys(self._core, project=project))

    async def list_keys_async(self, *, project: str = "") -> list[ApiKey]:
        """Do as `list_keys`, in the caller's event loop."""
        return await self._acall(calls.list_keys(self._core, project=project))

    def revoke_key(self, name: str, *, project: str = "") -> ApiKey:
        """Refuse a key, given by resource name or id, from now on; repeating it succeeds."""
        return self._call(calls.revoke_key(self._core, name, project=project))

    async def revoke_key_async(self, name: str, *, project: str = "") -> ApiKey:
        """Do as `revoke_key`, in the caller's event loop."""
        return await self._acall(calls.revoke_key(self._core, name, project=project))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._core.background.call(coroutine)

    async def _acall(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await self._core.background.acall(coroutine)
