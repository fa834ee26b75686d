"""An endpoint of OpenAI's chat API on the loopback, whose model is the player of an episode.

Libraries whose environments call their model themselves are given its address. A call waits until
the player has taken its turn. One server of a process serves all its episodes; the path of each
holds a secret, so that no other program plays.
"""

from __future__ import annotations

import http.server
import json
import os
import queue
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tinsmith.environments.adapters.chat_dialogue import completion, completion_chunk

MAX_REQUEST_BYTES = 64 << 20
"""Of one call; what a worker may answer is as long."""
TURN_TIMEOUT_S = 3600.0
"""What a call waits for the player's turn."""
_CALL_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Asked:
    """The environment calls its model, and waits for the answer."""

    request: Mapping[str, Any]
    _reply: queue.SimpleQueue[Mapping[str, Any] | None] = field(default_factory=queue.SimpleQueue)

    def answer(self, message: Mapping[str, Any]) -> None:
        """Answer with a message of the assistant."""
        self._reply.put(message)

    def drop(self) -> None:
        """Answer that there is no model any more."""
        self._reply.put(None)

    def wait(self) -> Mapping[str, Any] | None:
        """Return the answer; None where the episode is over, or nothing came in time."""
        try:
            return self._reply.get(timeout=TURN_TIMEOUT_S)
        except queue.Empty:
            return None


@dataclass(frozen=True, slots=True)
class Refused:
    """The environment called what this endpoint lacks."""

    problem: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The environment's own loop has ended."""

    outcome: Any
    """What it returned, or the error that it raised."""


Event = Asked | Refused | Ended


class ChatEndpoint:
    """The endpoint of one episode."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._asked: Asked | None = None
        self._is_closed = False
        self._server = _shared_server()
        self._secret = self._server.add(self)

    @property
    def url(self) -> str:
        """What clients of OpenAI's API take as the base."""
        return f"http://127.0.0.1:{self._server.server_port}/{self._secret}/v1"

    def tell(self, event: Event) -> None:
        """Let `next` return an event; called by any thread."""
        self._events.put(event)
        if self._is_closed and isinstance(event, Asked):
            event.drop()

    def next(self, timeout_s: float) -> Event:
        """Return what happens next.

        Raises:
            TimeoutError: If nothing happens in time.
        """
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(event, Asked):
            self._asked = event
        return event

    def answer(self, message: Mapping[str, Any]) -> None:
        """Answer the call that `next` returned last."""
        asked, self._asked = self._asked, None
        if asked is None:
            raise RuntimeError("no call waits for an answer")
        asked.answer(message)

    def close(self) -> None:
        """Refuse all calls from now on, those that wait included."""
        self._is_closed = True
        self._server.remove(self._secret)
        if self._asked is not None:
            self._asked.drop()
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, Asked):
                event.drop()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._endpoints: dict[str, ChatEndpoint] = {}
        threading.Thread(target=self.serve_forever, name="chat-endpoint", daemon=True).start()

    def add(self, endpoint: ChatEndpoint) -> str:
        secret = secrets.token_urlsafe(24)
        self._endpoints[secret] = endpoint
        return secret

    def remove(self, secret: str) -> None:
        self._endpoints.pop(secret, None)

    def find(self, secret: str) -> ChatEndpoint | None:
        return self._endpoints.get(secret)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    # How long a client may take to send its request.
    timeout = 60.0

    def handle(self) -> None:
        """Answer a connection; one whose client went away has no reader."""
        with suppress(BrokenPipeError, ConnectionResetError):
            super().handle()

    def do_POST(self) -> None:
        secret, _, rest = self.path.partition("/")[2].partition("/")
        endpoint = self.server.find(secret)
        if endpoint is None:
            self._send_error(404, "no episode is played here")
            return
        if f"/{rest}" != _CALL_PATH:
            problem = f"its model is called at /{rest}, and only {_CALL_PATH} is played"
            endpoint.tell(Refused(problem))
            self._send_error(404, problem)
            return
        length = self.headers.get("Content-Length") or ""
        if not length.isdigit() or int(length) > MAX_REQUEST_BYTES:
            problem = f"a call of its model has more than {MAX_REQUEST_BYTES} bytes, or no length"
            endpoint.tell(Refused(problem))
            self._send_error(413, problem)
            return
        try:
            request = json.loads(self.rfile.read(int(length)))
            model, streams = str(request["model"]), bool(request.get("stream"))
        except (ValueError, KeyError, TypeError, AttributeError):
            self._send_error(400, "the body is no request of a completion")
            return
        asked = Asked(request)
        endpoint.tell(asked)
        message = asked.wait()
        if message is None:
            self._send_error(503, "the episode is over")
            return
        whole = completion(message, model, len(request.get("messages") or ()))
        if streams:
            lines = (json.dumps(completion_chunk(whole)), "[DONE]")
            text = "".join(f"data: {line}\n\n" for line in lines)
            self._send(200, "text/event-stream", text)
        else:
            self._send(200, "application/json", json.dumps(whole))

    def do_GET(self) -> None:
        self._send_error(404, f"only {_CALL_PATH} is played")

    def log_message(self, *_: object) -> None:
        """Write nothing: paths hold secrets."""

    def _send_error(self, status: int, problem: str) -> None:
        self._send(status, "application/json", json.dumps({"error": {"message": problem}}))

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


_servers: dict[int, _Server] = {}
_lock = threading.Lock()


def _shared_server() -> _Server:
    """Return the server of this process; that of a parent has no threads here."""
    with _lock:
        server = _servers.get(os.getpid())
        if server is None:
            server = _servers[os.getpid()] = _Server()
        return server
