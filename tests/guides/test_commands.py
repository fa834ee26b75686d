"""The commands of the pages print what the pages show; `make test-guides`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.servers import Deployment
from tests.support.code_blocks import SHELL, Block, blocks_of, commands_of, pages

_TIMEOUT_S = 900


def _shell(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.language in SHELL and block.is_run]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [page for page in pages() if _shell(page)])
def test_the_commands_of_a_page_print_what_it_shows(
    page: str, server: Deployment, tmp_path: Path
) -> None:
    own = {name: value for name, value in os.environ.items() if "TINSMITH_" not in name}
    environment = {
        **own,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TINSMITH_ADDRESS": server.address,
        "TINSMITH_API_KEY": server.api_key,
        "TINSMITH_STATE_DIR": str(tmp_path / "state"),
        "TINSMITH_CACHE_DIR": str(tmp_path / "cache"),
        "NO_COLOR": "1",
        # Tables and lines are not folded.
        "COLUMNS": "200",
    }
    folder = tmp_path / "work"
    folder.mkdir()
    for block in _shell(page):
        commands = commands_of(block)
        for command in commands:
            done = subprocess.run(
                ["bash", "-euc", command.text],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            place = f"{page}:{block.line}: {command.text}{done.stdout}"
            fails = block.note == "fails" and command is commands[-1]
            assert (done.returncode != 0) == fails, place
            assert command.prints(done.stdout), place
