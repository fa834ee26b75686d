"""A session with a server of OpenEnv: its client on an event loop of its own, with deadlines."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import re
import threading
import typing
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from tinsmith.environments.adapters.deadlines import Deadline
from tinsmith.environments.adapters.failures import EpisodeFailedError
from tinsmith.environments.adapters.openenv_actions import ActionForm, InvalidTextError
from tinsmith.environments.adapters.openenv_views import fields_of
from tinsmith.environments.environment import Tool
from tinsmith.errors import ConfigurationError

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 50.0
"""What the answers of a server to one turn may take; below what a step of ours may."""
CLOSE_TIMEOUT_S = 8.0
"""What is waited until a session has ended; below what a close of ours may take."""
MAX_SCHEMA_BYTES = 4 << 20
"""Of the description of an environment's actions."""
_INVALID = "(code: VALIDATION_ERROR)"
_HTTP = {"ws": "http", "wss": "https"}
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")


class Session:
    """One session; `open` begins it.

    Args:
        env: The address of a server, or what makes a client.
        headers: HTTP headers of the connection.
        timeout_s: What the answers to one turn may take in all.
    """

    def __init__(self, env: Any, headers: Mapping[str, str], timeout_s: float) -> None:
        if not isinstance(env, str) and not callable(env):
            raise ConfigurationError(
                f"env is a {type(env).__name__}, and each episode needs a client of its own",
                remedy="give the address of the server, or what makes a client: lambda: MyEnv(...)",
            )
        if headers and not isinstance(env, str):
            raise ConfigurationError(
                "headers are given beside what makes a client",
                remedy="give them to the client that is made",
            )
        self._core = _import_core()
        self._env = env
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._deadline = Deadline(timeout_s)
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._client: Any = None

    @property
    def name(self) -> str:
        """What the environment is called in messages."""
        if isinstance(self._env, str):
            return self._env
        return getattr(self._env, "__name__", type(self._client or self._env).__name__)

    def begin_turn(self) -> None:
        """Allow the time of a turn, from now on."""
        self._deadline = Deadline(self._timeout_s)

    def open(self) -> None:
        """Connect.

        Raises:
            EpisodeFailedError: If the server is not reached in time.
            ConfigurationError: If no client of OpenEnv is made.
        """
        self._thread = threading.Thread(target=self._run, name="openenv", daemon=True)
        self._thread.start()
        self._call("connecting", self._connect)

    def action_form(self, *, is_needed: bool) -> ActionForm:
        """Return how a turn becomes an action.

        Args:
            is_needed: Whether nothing else makes actions of texts.

        Raises:
            ConfigurationError: If it is needed, and the action has no one field for a text.
        """
        form = self._form_of(_action_class(type(self._client)))
        if not is_needed or (form is not None and (form.has_tools or form.text_field)):
            return form or ActionForm()
        told = f"has the fields {form.fields}" if form else "is of a class that is not known"
        raise ConfigurationError(
            f"the action of the environment {self.name} of OpenEnv {told}, not one for a text",
            remedy="give action=, which returns the action of a text",
        )

    def reset(self, arguments: Mapping[str, Any]) -> Any:
        """Begin the episode; return the first result."""
        return self._call("reset", lambda: self._client.reset(**arguments))

    def step(self, action: Any) -> Any:
        """Apply an action; return its result.

        Raises:
            InvalidTextError: If the server takes no such action.
        """
        return self._take("step", action)

    def tools(self) -> tuple[Tool, ...]:
        """Return the tools that the environment gives."""
        result = self._call("listing tools", lambda: self._client.step(self._mcp("ListTools")))
        listed = fields_of(result.observation).get("tools") or []
        tools = [each.model_dump() if hasattr(each, "model_dump") else each for each in listed]
        return tuple(
            Tool(
                tool["name"],
                tool.get("description") or "",
                tool.get("input_schema") or tool.get("inputSchema") or {},
            )
            for tool in tools
        )

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool; return the result of the step.

        Raises:
            InvalidTextError: If the server takes no such call.
        """
        action = self._mcp("CallTool", tool_name=name, arguments=dict(arguments))
        return self._take(f"the tool {name}", action)

    def close(self) -> None:
        """End the session, and the loop."""
        if self._thread is None:
            self._loop.close()
            return
        deadline = self._deadline = Deadline(CLOSE_TIMEOUT_S)
        if self._client is not None:
            try:
                self._call("closing", self._client.close)
            except EpisodeFailedError as error:
                logger.warning("session of OpenEnv not closed", extra={"problem": str(error)})
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(deadline.left_s())
        self._thread = None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _connect(self) -> None:
        if isinstance(self._env, str):
            given: dict[str, Any] = {"base_url": self._env, "message_timeout_s": self._timeout_s}
            if self._headers:
                given["headers"] = self._headers
            self._client = self._core.GenericEnvClient(**given)
        else:
            made = self._env()
            self._client = await made if inspect.isawaitable(made) else made
        if not isinstance(self._client, self._core.EnvClient):
            raise ConfigurationError(
                f"what makes a client returned a {type(self._client).__name__}, no EnvClient",
                remedy="return the client itself, without .sync()",
            )
        await self._client.connect()

    def _call(self, what: str, make: Callable[[], Any]) -> Any:
        async def awaited() -> Any:
            return await make()

        future = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        try:
            return future.result(self._deadline.left_s())
        except TimeoutError:
            future.cancel()
            limit_s = self._deadline.timeout_s
            raise EpisodeFailedError(
                f"{self.name}: {what} took over {limit_s:g} s, with what came before it"
            ) from None
        except ConfigurationError:
            raise
        except Exception as error:
            # Clients raise errors of sockets, of JSON, and plain ones with the server's text.
            raise EpisodeFailedError(
                f"{self.name}: {what} failed: {type(error).__name__}: {error}"
            ) from error

    def _take(self, what: str, action: Any) -> Any:
        try:
            return self._call(what, lambda: self._client.step(action))
        except EpisodeFailedError as error:
            if _INVALID in str(error):
                raise InvalidTextError("the environment takes no such action") from error
            raise

    def _mcp(self, kind: str, **fields: Any) -> Any:
        types: Any = importlib.import_module("openenv.core.env_server.mcp_types")
        return getattr(types, f"{kind}Action")(**fields)

    def _form_of(self, typed: Any) -> ActionForm | None:
        mcp: Any = importlib.import_module("openenv.core.mcp_client")
        if isinstance(self._client, mcp.MCPClientBase):
            return ActionForm(has_tools=True)
        if typed is not None:
            return ActionForm.of_schema(typed.model_json_schema(), typed)
        base_url = self._env if isinstance(self._env, str) else _base_url(self._client)
        if not base_url or not isinstance(self._client, self._core.GenericEnvClient):
            return None
        headers = {**(getattr(self._client, "_headers", None) or {}), **self._headers}
        return ActionForm.of_schema(_fetch_schema(base_url, headers, self._deadline.left_s()))


def _import_core() -> Any:
    try:
        return importlib.import_module("openenv.core")
    except ImportError as error:
        raise ConfigurationError(
            "environments of OpenEnv need openenv, which is not installed",
            remedy="pip install openenv",
        ) from error


def _base_url(client: Any) -> str:
    return str(getattr(client, "base_url", None) or "")


def _action_class(client_class: type[Any]) -> Any:
    """Return the class of a typed client's actions: what `EnvClient[...]` is given first."""
    for base in client_class.__mro__:
        for given in getattr(base, "__orig_bases__", ()):
            arguments = typing.get_args(given)
            if arguments and hasattr(arguments[0], "model_json_schema"):
                return arguments[0]
    return None


def _fetch_schema(base_url: str, headers: Mapping[str, str], timeout_s: float) -> Mapping[str, Any]:
    """Return the JSON schema of a server's actions."""
    scheme, _, rest = base_url.rstrip("/").partition("://")
    url = f"{_HTTP.get(scheme, scheme)}://{rest}/schema"
    try:
        request = urllib.request.Request(url, headers=dict(headers))
        with _opener(url).open(request, timeout=timeout_s) as answer:
            text = answer.read(MAX_SCHEMA_BYTES + 1)
        if len(text) > MAX_SCHEMA_BYTES:
            raise ValueError(f"the answer is over {MAX_SCHEMA_BYTES >> 20} MiB")
        schema = json.loads(text)["action"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EpisodeFailedError(f"{url} describes no actions: {error}") from error
    if not isinstance(schema, Mapping):
        raise EpisodeFailedError(f"{url} describes no actions")
    return schema


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return what opens an address; no proxy reaches the loopback of this machine."""
    if _LOOPBACK.fullmatch(urllib.parse.urlsplit(url).hostname or ""):
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()
