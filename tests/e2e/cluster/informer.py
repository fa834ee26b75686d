"""Keeps a copy of a collection current, and says what changes."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping

import urllib3
from urllib3.exceptions import HTTPError

from tests.e2e.cluster.api import ApiClient, ApiError, Json, read_events

logger = logging.getLogger(__name__)

_WATCH_S = 300
_SYNC_TIMEOUT_S = 30.0
_RETRY_S = 0.2


class Informer:
    """A thread that lists a collection, then watches it, and starts again whenever that breaks.

    Args:
        api: Client.
        url: Path of the collection.
        on_change: Gets `ADDED`, `MODIFIED` or `DELETED` and the object, in the informer's thread. A
            change may be told twice, and changes between two tellings may be skipped.
        params: Such as `fieldSelector`.
    """

    def __init__(
        self,
        api: ApiClient,
        url: str,
        on_change: Callable[[str, Json], None],
        params: Mapping[str, object] | None = None,
    ) -> None:
        self.objects: dict[str, Json] = {}
        """The objects by uid; a thread other than the informer's copies it before iterating."""
        self._api = api
        self._url = url
        self._on_change = on_change
        self._params = dict(params or {})
        self._stopped = threading.Event()
        self._synced = threading.Event()
        self._response: urllib3.BaseHTTPResponse | None = None
        self._thread = threading.Thread(target=self._run, name=f"informer {url}", daemon=True)

    def start(self) -> None:
        """Return once the first list was told."""
        self._thread.start()
        if not self._synced.wait(_SYNC_TIMEOUT_S):
            raise TimeoutError(f"{self._url} cannot be listed")

    def stop(self) -> None:
        """Break the watch and wait for the thread."""
        self._stopped.set()
        if (response := self._response) is not None:
            with contextlib.suppress(ValueError, OSError):  # it ended by itself meanwhile
                response.shutdown()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._watch(self._list())
            except (ApiError, HTTPError, OSError, ValueError) as error:
                if not self._stopped.wait(_RETRY_S):
                    logger.info("watch of %s begins again: %s", self._url, error)
            except Exception:
                logger.exception("an informer's listener failed")
                self._stopped.wait(_RETRY_S)

    def _list(self) -> str:
        answer = self._api.request("GET", self._url, params=self._params)
        kind = answer["kind"].removesuffix("List")
        listed = {item["metadata"]["uid"]: item for item in answer["items"]}
        for uid, known in list(self.objects.items()):
            if uid not in listed:
                self._tell("DELETED", known)
        for item in listed.values():
            item.setdefault("kind", kind)
            known_now = self.objects.get(item["metadata"]["uid"])
            if known_now is None or _revision(known_now) != _revision(item):
                self._tell("ADDED" if known_now is None else "MODIFIED", item)
        self._synced.set()
        revision: str = answer["metadata"]["resourceVersion"]
        return revision

    def _watch(self, revision: str) -> None:
        while not self._stopped.is_set():
            self._response = self._api.open_watch(
                self._url,
                timeout_s=_WATCH_S,
                resourceVersion=revision,
                allowWatchBookmarks="true",
                **self._params,
            )
            try:
                if self._stopped.is_set():  # stop() came before it could see the response
                    return
                for event in read_events(self._response):
                    revision = _revision(event.object)
                    if event.type != "BOOKMARK":
                        self._tell(event.type, event.object)
            finally:
                self._response.close()

    def _tell(self, kind: str, item: Json) -> None:
        uid = item["metadata"]["uid"]
        if kind == "DELETED":
            self.objects.pop(uid, None)
        else:
            self.objects[uid] = item
        self._on_change(kind, item)


def _revision(item: Json) -> str:
    revision: str = item["metadata"]["resourceVersion"]
    return revision
