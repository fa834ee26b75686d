"""Downloads that are cut off, and servers that are not to be believed."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.sdk_fake_server import RUN, FakeServer

import tinsmith

NAME = f"{RUN}/checkpoints/a"
CONTENT = bytes(range(95))


def test_a_stream_that_breaks_off_is_continued(
    server: FakeServer, client: tinsmith.Client, tmp_path: Path
) -> None:
    server.update(files={"w.safetensors": CONTENT}, cut_streams=3)
    told: list[tuple[int, int]] = []
    (path,) = client.checkpoints.download(
        NAME, tmp_path, progress=lambda done, total: told.append((done, total))
    )
    assert path.read_bytes() == CONTENT
    assert server.state.offsets == [0, 10, 20, 30]
    assert told[-1] == (95, 95)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("name", ["../w", "/etc/w", "", ".w", "a\\w", "a/b"])
def test_a_file_never_leaves_its_folder(
    name: str, server: FakeServer, client: tinsmith.Client, tmp_path: Path
) -> None:
    server.update(files={name: CONTENT})
    with pytest.raises(tinsmith.InternalError):
        client.checkpoints.download(NAME, tmp_path / "in")
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == set()


class RangeHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a file with ranges, and breaks the first answer off."""

    answered: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        self.answered.append(wanted)
        begin = int(wanted.removeprefix("bytes=").rstrip("-"))
        self.send_response(206)
        self.send_header("Content-Length", str(len(CONTENT) - begin))
        self.end_headers()
        end = begin + 30 if len(self.answered) == 1 else len(CONTENT)
        self.wfile.write(CONTENT[begin:end])
        self.close_connection = True

    def log_message(self, *args: Any) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    RangeHandler.answered = []
    handler = functools.partial(RangeHandler)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        thread = threading.Thread(target=web.serve_forever, args=[0.02], daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}/w"
        web.shutdown()
        thread.join()


def test_a_signed_url_is_fetched_with_ranges(
    url: str, server: FakeServer, client: tinsmith.Client, tmp_path: Path
) -> None:
    server.update(files={"w.safetensors": CONTENT}, file_url=url)
    (path,) = client.checkpoints.download(NAME, tmp_path)
    assert path.read_bytes() == CONTENT
    assert RangeHandler.answered == ["bytes=0-", "bytes=30-"]
    assert not server.state.offsets


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/x"])
def test_other_urls_are_not_followed(
    url: str, server: FakeServer, client: tinsmith.Client, tmp_path: Path
) -> None:
    server.update(files={"w.safetensors": CONTENT}, file_url=url)
    with pytest.raises(tinsmith.InternalError):
        client.checkpoints.download(NAME, tmp_path)


def test_a_folder_without_safetensors_is_not_sent(client: tinsmith.Client, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(tinsmith.ConfigurationError) as refused:
        client.checkpoints.import_adapter(tmp_path, "run-1", "c")
    assert "safe_serialization" in str(refused.value)
