"""The files of the page: whole, of this server alone, and nothing that a browser may not run."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.fakes.gateway_harness import running_gateway

from tinsmith_gateway.page.static_files import STATIC


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with running_gateway(tmp_path) as rig:
        url = f"http://{rig.gateway.address}"
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield client


async def test_every_file_is_served_without_a_key_and_with_its_policy(
    http: httpx.AsyncClient,
) -> None:
    names = [path.name for path in STATIC.iterdir()]
    assert {"index.html", "page.js", "style.css", "licences.txt"} <= set(names)
    for name in names:
        answer = await http.get("/" if name == "index.html" else f"/page/{name}")
        assert answer.status_code == 200
        assert answer.content == (STATIC / name).read_bytes()
        policy = answer.headers["content-security-policy"].split("; ")
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert not re.search(r"unsafe|http|\*", answer.headers["content-security-policy"])
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in answer.headers


async def test_what_a_browser_has_is_not_sent_again(http: httpx.AsyncClient) -> None:
    first = await http.get("/page/page.js")
    again = await http.get("/page/page.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_the_page_loads_what_is_there_and_nothing_else(http: httpx.AsyncClient) -> None:
    index = (await http.get("/")).text
    loaded = re.findall(r'(?:src|href)="([^"]+)"', index)
    assert len(loaded) == 3
    for path in loaded:
        assert (await http.get(path)).status_code == 200
    assert not re.search(r"<script(?![^>]*src=)|<style| on\w+=", index)
    style = (await http.get("/page/style.css")).text
    assert not re.search(r"@import|url\(", style)


@pytest.mark.parametrize("path", ["/page/none.js", "/page/../app.py", "/page/%2e%2e/app.py"])
async def test_other_files_are_not_there(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 404


async def test_what_is_shown_needs_a_key(http: httpx.AsyncClient) -> None:
    for path in ("me", "runs", "events?topic=runs"):
        answer = await http.get(f"/page/api/{path}")
        assert answer.status_code == 401
        assert answer.json()["error"]["reason"] == "KEY_MISSING"
        assert answer.headers["cache-control"] == "no-store"
