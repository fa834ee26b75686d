"""Writes docs/reference: SDK, commands, contract and the list of decisions, for the site.

The pages are made when the site is built, and not committed: each would differ with every change of
the code that it describes, and what they say is readable in the code.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from docs import cli_reference, contract_reference, decisions_reference, sdk_reference
from docs.descriptors import ROOT

FOLDER = ROOT / "docs/reference"


def pages() -> Mapping[str, str]:
    """Return all pages by their names below the folder."""
    return {
        **decisions_reference.pages(),
        **sdk_reference.pages(),
        **cli_reference.pages(),
        **contract_reference.pages(),
    }


def write(folder: Path = FOLDER) -> None:
    """Write the pages into a folder, in the place of older ones."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
