"""The Python of the pages runs as it stands there, page by page, against one server."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
from pathlib import Path

import pytest
from tests.integration.servers import Deployment
from tests.support.code_blocks import PYTHON, ROOT, Block, blocks_of, pages

import tinsmith

# `await` at the top of a block, as in a notebook.
_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def _python(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == PYTHON and block.is_run]


@pytest.mark.parametrize("page", [page for page in pages() if _python(page)])
async def test_the_python_of_a_page_runs(
    page: str, embedded: Deployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINSMITH_ADDRESS", embedded.address)
    monkeypatch.setenv("TINSMITH_API_KEY", embedded.api_key)
    # What a page writes goes to a folder of its own; modules of its own are found there.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {}
    try:
        for block in _python(page):
            # Lines of a traceback are those of the page.
            code = "\n" * block.line + block.code
            compiled = compile(code, os.fspath(ROOT / page), "exec", flags=_FLAGS)
            if compiled.co_flags & inspect.CO_COROUTINE:
                await eval(compiled, names)
            else:
                # As in a script: without a loop that runs in its thread.
                await asyncio.to_thread(eval, compiled, names)
    finally:
        for value in names.values():
            if isinstance(value, tinsmith.Client):
                value.close()
