"""The `tinsmith` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tinsmith.cli.app import build_app
from tinsmith.cli.failures import report, shows_traces


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; failures are one line with the remedy, and exit code 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        build_app(given)(given, prog_name="tinsmith")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if shows_traces():
            raise
        report(error)
        sys.exit(1)
