"""A mirror of the Hugging Face hub on this machine: what `HF_ENDPOINT` may name instead of the hub.

It speaks as much of the hub's protocol as `huggingface_hub` and `datasets` need to fetch a model or
a data set: what a revision holds, and its files with their hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

_NAME = r"[^/]+/[^/]+"
_INFO = re.compile(rf"/api/(models|datasets)/({_NAME})(?:/revision/[^/]+)?")
_TREE = re.compile(rf"/api/(models|datasets)/({_NAME})/tree/[^/]+/?(.*)")
_PATHS = re.compile(rf"/api/(models|datasets)/({_NAME})/paths-info/[^/]+")
_FILE = re.compile(rf"/(datasets/)?({_NAME})/resolve/[^/]+/(.+)")
_MODELS, _DATASETS = "models", "datasets"


_CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
---
"""


class HubMirror:
    """What a mirror offers, and what was asked of it.

    Attributes:
        endpoint: Its URL.
        served: Files that were sent, `owner/name/file`.
        folders: By kind, the directories by `owner/name`.
        is_broken: Whether it answers everything with 503.
    """

    def __init__(self, folders: Mapping[str, Mapping[str, Path]], endpoint: str) -> None:
        self.folders = folders
        self.endpoint = endpoint
        self.served: list[str] = []
        self.is_broken = False


@contextlib.contextmanager
def running_hub(
    models: Mapping[str, Path], datasets: Mapping[str, Path] | None = None
) -> Iterator[HubMirror]:
    """Serve models and data sets from directories for the time of a block.

    Args:
        models: Directory by `owner/name`.
        datasets: The same of data sets.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    folders = {_MODELS: models, _DATASETS: datasets or {}}
    mirror = HubMirror(folders, f"http://127.0.0.1:{server.server_port}")
    server.mirror = mirror  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer("")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())

    def _answer(self, body: str) -> None:
        path = unquote(self.path.partition("?")[0])
        mirror: HubMirror = self.server.mirror  # type: ignore[attr-defined]
        if mirror.is_broken:
            self._send(b"{}", status=503)
            return
        answers: tuple[tuple[re.Pattern[str], Callable[[str, Path, str], object]], ...] = (
            (_INFO, self._info),
            (_TREE, self._tree),
            (_PATHS, self._paths),
        )
        for pattern, answer in answers:
            match = pattern.fullmatch(path)
            folder = mirror.folders[match[1]].get(match[2]) if match else None
            if match is not None and folder is not None:
                what = match[3] if pattern is _TREE else body
                self._send(json.dumps(answer(match[2], folder, what)).encode())
                return
        match = _FILE.fullmatch(path)
        folders = mirror.folders[_DATASETS if match and match[1] else _MODELS]
        folder = folders.get(match[2]) if match else None
        file = folder / match[3] if match and folder else None
        if match is None or folder is None or file is None or not file.is_file():
            code = "EntryNotFound" if folder else "RepoNotFound"
            self._send(b"{}", status=404, headers={"X-Error-Code": code})
            return
        if self.command == "GET":
            mirror.served.append(f"{match[2]}/{match[3]}")
        data = file.read_bytes()
        etag = hashlib.sha256(data).hexdigest()
        self._send(data, headers={"ETag": f'"{etag}"', "X-Repo-Commit": _commit(folder)})

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _info(self, name: str, folder: Path, body: str) -> dict[str, object]:
        del body
        return {
            "id": name,
            "modelId": name,
            "sha": _commit(folder),
            "siblings": [{"rfilename": file} for file in _files(folder)],
            "private": False,
            "gated": False,
            "tags": [],
            "downloads": 0,
        }

    def _tree(self, name: str, folder: Path, below: str) -> list[dict[str, object]]:
        del name
        if "recursive=true" in self.path.lower():
            return [_entry(folder, file) for file in _files(folder / below, folder)]
        found = sorted((folder / below).glob("*"))
        return [_entry(folder, str(path.relative_to(folder))) for path in found]

    def _paths(self, name: str, folder: Path, body: str) -> list[dict[str, object]]:
        del name
        is_json = self.headers.get("Content-Type", "").startswith("application/json")
        asked = json.loads(body)["paths"] if is_json else parse_qs(body).get("paths", [])
        return [_entry(folder, file) for file in asked if (folder / file).is_file()]

    def _send(
        self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def write_dataset(folder: Path) -> Path:
    """Write a data set as a repository of the hub has it."""
    import datasets

    for part, numbers in (("train", range(6)), ("test", range(6, 8))):
        rows = [{"problem": f"{n} + 1 = ?", "answer": f"#### {n + 1}"} for n in numbers]
        file = folder / "main" / f"{part}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(str(file))
    (folder / "README.md").write_text(_CARD)
    return folder


def _files(folder: Path, root: Path | None = None) -> list[str]:
    root = root or folder
    return sorted(str(path.relative_to(root)) for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, file: str) -> dict[str, object]:
    if (folder / file).is_dir():
        oid = hashlib.sha1(file.encode()).hexdigest()
        return {"type": "directory", "path": file, "size": 0, "oid": oid}
    content = (folder / file).read_bytes()
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": file, "size": len(content), "oid": oid}


def _commit(folder: Path) -> str:
    """Return the one revision that a folder has: a hash in the form that the hub's have."""
    return hashlib.sha1(str(folder).encode()).hexdigest()
