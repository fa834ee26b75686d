"""The `tinsmith` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tinsmith.cli.app import build_app
from tinsmith.errors import TinsmithError
from tinsmith.names import InvalidNameError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; failures are one line with the remedy, and exit code 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        build_app(given)(given, prog_name="tinsmith")
    except (TinsmithError, InvalidNameError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
