"""The program that plays an environment of verifiers: a loop of chat, in this process.

verifiers calls it a harness, and finds it by the name of a module. Its own `null` harness is the
same loop as a script, which needs uv and packages from the network for each interpreter. Here every
call of the model goes through verifiers as well, so that its hooks and limits see it.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from contextlib import AsyncExitStack
from typing import Any

HARNESS_ID = "tinsmith_chat"
"""What a config of verifiers calls this harness."""
_CONNECT_TIMEOUT_S = 10.0


def register() -> str:
    """Let verifiers find the harness by its id, which is returned.

    Raises:
        ImportError: If verifiers is missing, or is older than its harnesses.
    """
    if HARNESS_ID not in sys.modules:
        module: Any = types.ModuleType(HARNESS_ID)
        module.ChatHarness = _make_class()
        module.__all__ = ["ChatHarness"]
        sys.modules[HARNESS_ID] = module
    return HARNESS_ID


def _make_class() -> Any:
    vf: Any = importlib.import_module("verifiers.v1")

    class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # a class of theirs
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        SUPPORTS_TOOL_INTERCEPTION = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,  # noqa: ARG002 - of their signature
            runtime: Any,  # noqa: ARG002
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            """Talk until the model calls no tool; see `Harness.launch` of verifiers."""
            system, prompt = self.resolve_prompt(data)
            messages = _opening(system, prompt)
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout}
                for name, url in mcp_urls.items()
            }
            async with AsyncExitStack() as stack:
                talk = _Talk(endpoint, secret, ctx.model, tool_interception_url)
                await talk.open(servers, stack)
                problem = await talk.run(messages)
            return vf.ProgramResult(exit_code=1 if problem else 0, stdout="", stderr=problem)

    return ChatHarness


def _opening(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """Return the messages that stand before the first call of the model."""
    dialect: Any = importlib.import_module("verifiers.v1.dialects.chat")
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(dialect.message_to_wire(message) for message in prompt or ())]


class _Talk:
    """Calls of the model, and of the tools that it calls."""

    def __init__(self, endpoint: str, secret: str, model: str, gate_url: str | None) -> None:
        self._endpoint = endpoint
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._model = model
        self._gate_url = gate_url
        self._mcp: Any = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
        self._http: Any = None
        self._tools: list[Any] = []
        self._dispatch: dict[str, Any] = {}
        self._servers: dict[str, Any] = {}

    async def open(self, servers: dict[str, Any], stack: AsyncExitStack) -> None:
        httpx: Any = importlib.import_module("httpx")
        # Rollouts are bounded by verifiers' own deadlines, which cancel this loop.
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._http = await stack.enter_async_context(
            httpx.AsyncClient(timeout=timeout, trust_env=False)
        )
        self._tools, self._dispatch, self._servers = await self._mcp.connect_mcp(
            {"mcpServers": servers}, stack
        )

    async def run(self, messages: list[dict[str, Any]]) -> str:
        """Return what went wrong, or nothing."""
        while True:
            body: dict[str, Any] = {"model": self._model, "messages": messages}
            if self._tools:
                body["tools"] = self._tools
            url = f"{self._endpoint}/chat/completions"
            response = await self._http.post(url, json=body, headers=self._headers)
            if response.status_code != 200:
                return f"the model's call was answered by {response.status_code}: {response.text}"
            message = response.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return ""
            for call in message["tool_calls"]:
                answer = await self._answer(call)
                if isinstance(answer, str):
                    return answer
                messages.append(answer)

    async def _answer(self, call: dict[str, Any]) -> dict[str, Any] | str:
        """Return the message that answers a call; or why the rollout was stopped before it."""
        name, written = call["function"]["name"], call["function"]["arguments"]
        arguments, problem = _read_arguments(written)
        if self._gate_url:
            asked = {"tool_call_id": call["id"], "name": name}
            asked["arguments"] = written if arguments is None else arguments
            response = await self._http.post(self._gate_url, json=asked, headers=self._headers)
            if response.status_code != 200:
                return f"the gate of tools answered {response.status_code}: {response.text}"
            decision: dict[str, Any] = response.json()
            if decision["action"] == "stop":
                return f"stopped before a call of {name}: {decision['reason']}"
            if decision["action"] == "deny":
                denied: dict[str, Any] = decision["message"]
                return denied
        if arguments is None:
            content: Any = problem
        elif name not in self._dispatch:
            content = f"error: unknown tool {name!r}"
        else:
            content = await self._mcp.call_mcp(self._servers, self._dispatch, name, arguments)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def _read_arguments(written: str) -> tuple[dict[str, Any] | None, str]:
    """Return the arguments of a call, or what the model is told about them."""
    try:
        arguments = json.loads(written or "{}")
    except ValueError as error:
        return None, f"error: invalid JSON in tool arguments ({error}); resend the call"
    if not isinstance(arguments, dict):
        return None, "error: tool arguments must be a JSON object; resend the call"
    return arguments, ""
