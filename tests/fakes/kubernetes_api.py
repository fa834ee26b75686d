"""The part of a Kubernetes API server that the launcher of jobs uses, over HTTP."""

from __future__ import annotations

import json
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

JOBS = "/apis/tinsmith.dev/v1alpha1/namespaces/space/trainingjobs"
PODS = "/api/v1/namespaces/space/pods"


class FakeKubernetes:
    """Keeps training jobs of one namespace, and logs of pods, in memory.

    `refusals` are answered first, one `(status, message)` for each call; `pods` are the metadata of
    each pod, `logs` its lines, with their times. `paths` are of all calls so far.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, list[tuple[str, str]]] = {}
        self.refusals: list[tuple[int, str]] = []
        self.delay_s = 0.0
        self.paths: list[str] = []
        self.changed = threading.Condition()
        self._version = 100
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.answer(self, "GET")

            def do_POST(self) -> None:
                fake.answer(self, "POST")

            def do_PATCH(self) -> None:
                fake.answer(self, "PATCH")

            def do_DELETE(self) -> None:
                fake.answer(self, "DELETE")

            def log_message(self, *args: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True)

    def start(self) -> client.ApiClient:
        """Serve, and return a connection."""
        self._thread.start()
        settings = client.Configuration()
        settings.host = f"http://127.0.0.1:{self._server.server_port}"
        settings.retries = False
        return client.ApiClient(settings)

    def stop(self) -> None:
        """Close."""
        self._server.shutdown()
        self._server.server_close()

    def update(self, name: str, **status: Any) -> None:
        """Change the status of a job, as the controller does."""
        with self.changed:
            self.jobs[name].setdefault("status", {}).update(status)
            self._touch(name)

    def answer(self, call: BaseHTTPRequestHandler, method: str) -> None:
        """Answer one call."""
        self.paths.append(call.path)
        url = urlsplit(call.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        size = int(call.headers.get("content-length") or 0)
        body = json.loads(call.rfile.read(size)) if size else None
        time.sleep(self.delay_s)
        if self.refusals:
            status, message = self.refusals.pop(0)
            return _send(call, status, {"message": message})
        if url.path.endswith("/log"):
            return self._send_log(call, url.path.split("/")[-2], query)
        if url.path == "/version":
            return _send(call, 200, {"minor": "31+"})
        if url.path == PODS:
            return _send(call, 200, {"items": self._find_pods(query["labelSelector"])})
        if query.get("watch"):
            return self._watch(call, query)
        name = url.path.removeprefix(JOBS).strip("/")
        with self.changed:
            status, answer = self._act(method, name, query, body)
        return _send(call, status, answer)

    def _act(self, method: str, name: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if method == "POST":
            name = body["metadata"]["name"]
            if name in self.jobs:
                return 409, {"message": f"trainingjobs {name} already exists"}
            body["metadata"] |= {
                "uid": str(uuid.uuid4()),
                "creationTimestamp": "2026-11-22T08:00:00Z",
            }
            self.jobs[name] = body
            self._touch(name)
            return 201, body
        if not name:
            names = sorted(self.jobs)
            names = names[names.index(query["continue"]) :] if "continue" in query else names
            limit = int(query["limit"])
            more = {"continue": names[limit]} if len(names) > limit else {}
            return 200, {"metadata": more, "items": [self.jobs[each] for each in names[:limit]]}
        if name not in self.jobs:
            return 404, {"message": f"trainingjobs {name} not found"}
        if method == "PATCH":
            self.jobs[name]["spec"] |= body.get("spec", {})
            annotations = self.jobs[name]["metadata"].setdefault("annotations", {})
            annotations |= body.get("metadata", {}).get("annotations", {})
            self._touch(name)
        elif method == "DELETE":
            self.changed.notify_all()
            return 200, self.jobs.pop(name)
        return 200, self.jobs[name]

    def _find_pods(self, selector: str) -> list[Any]:
        wanted = dict(each.split("=") for each in selector.split(","))
        return [{"metadata": pod} for pod in self.pods if wanted.items() <= pod["labels"].items()]

    def _touch(self, name: str) -> None:
        self._version += 1
        self.jobs[name]["metadata"]["resourceVersion"] = str(self._version)
        self.changed.notify_all()

    def _watch(self, call: BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        name = query["fieldSelector"].removeprefix("metadata.name=")

        def is_new() -> bool:
            job = self.jobs.get(name)
            return job is None or job["metadata"]["resourceVersion"] != query["resourceVersion"]

        with self.changed:
            self.changed.wait_for(is_new, timeout=float(query["timeoutSeconds"]))
            event = {"type": "MODIFIED", "object": self.jobs.get(name, {"metadata": {}})}
        _send(call, 200, event, end="\n")

    def _send_log(self, call: BaseHTTPRequestHandler, pod: str, query: dict[str, str]) -> None:
        if pod not in self.logs:
            return _send(call, 404, {"message": f"pods {pod} not found"})
        lines = self.logs[pod]
        if "tailLines" in query:
            lines = lines[-int(query["tailLines"]) :]
        text = "".join(f"{moment} {line}\n" for moment, line in lines).encode()
        call.send_response(200)
        call.send_header("content-type", "text/plain")
        call.send_header("content-length", str(len(text)))
        call.end_headers()
        call.wfile.write(text)
        return None


def _send(call: BaseHTTPRequestHandler, status: int, body: Any, end: str = "") -> None:
    content = (json.dumps(body) + end).encode()
    call.send_response(status)
    call.send_header("content-type", "application/json")
    call.send_header("content-length", str(len(content)))
    call.end_headers()
    call.wfile.write(content)
