"""Every HTTP route of the gateway, with bodies and names that are wrong on purpose."""

from __future__ import annotations

import json
import random
import re
from typing import Any
from urllib.parse import quote

import httpx

from tests.fuzz import words
from tests.fuzz.tally import Tally
from tinsmith_gateway.access.permissions import HTTP_PERMISSIONS
from tinsmith_runtime.rpc.auth import ApiKey

# It would take the attacker's key away, and leave nothing to attack with.
_SPARED = {("DELETE", "/api/v1/auth/apikey/me")}
_OPEN = [
    *(("GET", "/health"), ("GET", "/healthz"), ("GET", "/api/v1/healthz"), ("GET", "/nothing")),
    *(("GET", "/api/v1/downloads/{x}"), ("GET", "/api/v1/downloads/traces/{x}"), ("POST", "/")),
]
_ROUTES = [*(HTTP_PERMISSIONS.keys() - _SPARED), *_OPEN]
_PARAMETER = re.compile(r"\{[^}]*\}")
_NAMES = ["x", "-", "..", "\u0000", "é", "a/b", "%2f", "weights", "sampler_weights", "x" * 3000]
_QUERIES = ["", "?limit=1", "?limit=-1&offset=x", "?day=9999-12-31", "?" + "a=b&" * 200, "?%ff"]
_TYPES = ["application/json"] * 9 + ["text/plain", "application/x-protobuf", "", "x" * 500]
_CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ],
    "max_tokens": 2,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 2,
    "stop": ["x"],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "chat_template_kwargs": {"a": 1},
    "n": 2,
}
_COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "prompt": ["a", "b"],
    "max_tokens": 2,
    "echo": True,
    "logprobs": 2,
    "seed": 1,
    "temperature": 1.0,
    "top_p": 0.5,
    "stream": False,
    "stop": "x",
    "n": 1,
}
_EPISODE: dict[str, Any] = {
    "episode_uuid": "x",
    "client_uuid": "x",
    "episode_type": "train",
    "openai_base_url": "",
    "task_id": "a",
    "workflow_output": {"reward": 1.0, "metadata": {"a": 1}},
    "task": {"a": 1},
    "allow_discard_timeout": 60,
    "max_wait": 0,
    "group": "g",
    "episodes": [{"task": {}}],
}
_TINKER: dict[str, Any] = {
    "session_id": "x",
    "model_id": "x:train:0",
    "seq_id": 1,
    "path": "tinker://x/weights/a",
    "sampling_session_id": "x",
    "request_id": "op.x/1/optim_step",
    "base_model": "tiny",
    "tinker_path": "tinker://x/weights/a",
    "ttl_seconds": 60,
    "adam_params": {"beta1": 0.9},
    "query": "a",
    "project_id": "p",
    "events": [{"a": 1}],
    "sdk_version": "0.38.0",
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "num_samples": 1,
    "sampling_params": {"max_tokens": 2},
    "lora_config": {"rank": 4},
    "user_metadata": {},
}


class Routes:
    """Sends hostile HTTP requests.

    Args:
        url: Of the gateway.
        key: A good one, of a project of its own.
    """

    def __init__(self, url: str, key: str) -> None:
        self._key = key
        limits = httpx.Limits(max_connections=8)
        self._http = httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def send(self, tally: Tally, chance: random.Random) -> None:
        """Send one request, and look at its answer."""
        method, path = chance.choice(_ROUTES)
        target = _PARAMETER.sub(lambda _: quote(chance.choice(_NAMES)), path)
        target += chance.choice(_QUERIES) if chance.random() < 0.3 else ""
        if chance.random() < 0.03:
            method = chance.choice(["GET", "POST", "PUT", "PATCH", "OPTIONS"])
        content = b"" if method == "GET" else self._content(path, chance)
        answer = await self._http.request(
            method, target, content=content, headers=self._headers(chance)
        )
        self._look(tally, f"{method} {target} {content!r:.300}", answer)

    def _content(self, path: str, chance: random.Random) -> bytes:
        if chance.random() < 0.1:
            return chance.randbytes(chance.choice([1, 40, 3000]))
        if path.startswith("/v1"):
            body = _CHAT if "chat" in path else _COMPLETION
        else:
            body = _TINKER if path.startswith("/api") else _EPISODE
        if chance.random() < 0.1:
            return json.dumps(body).encode()
        return words.mutate(body, chance).encode("utf-8", "surrogatepass")

    def _headers(self, chance: random.Random) -> dict[str, str]:
        headers = {"content-type": chance.choice(_TYPES)}
        draw = chance.random()
        if draw < 0.4:
            headers["x-api-key"] = self._key
        elif draw < 0.8:
            headers["authorization"] = f"Bearer {self._key}"
        elif draw < 0.85:
            headers["x-api-key"] = chance.choice([str(ApiKey.generate()), "tse-x", "tml-", "x"])
        if chance.random() < 0.03:
            headers["content-encoding"] = chance.choice(["gzip", "zstd", "br"])
        return headers

    def _look(self, tally: Tally, what: str, answer: httpx.Response) -> None:
        status = answer.status_code
        tally.count("route", str(status))
        if status == 500 or "Traceback" in answer.text:
            tally.fail(f"{what} -> {status} {answer.text!r:.300}")
        elif status >= 400 and not _says_what(answer):
            tally.fail(f"untyped: {what} -> {status} {answer.text!r:.300}")


def _says_what(answer: httpx.Response) -> bool:
    if answer.status_code == 408 and not answer.content:
        # A body that did not come in time.
        return True
    try:
        said = answer.json()
    except ValueError:
        return False
    return isinstance(said, dict) and bool(said.keys() & {"error", "detail"})
