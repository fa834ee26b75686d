"""The `tinsmith` command."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Sequence

from tinsmith.cli.app import build_app
from tinsmith.cli.failures import report, shows_traces


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; failures are one line with the remedy, and exit code 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _take_any_terminal()
    try:
        build_app(given)(given, prog_name="tinsmith")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if shows_traces():
            raise
        report(error)
        sys.exit(1)


def _take_any_terminal() -> None:
    """Show letters that a terminal lacks by their number; read what is typed there as UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and _is_ascii(sys.stdin.encoding):
        sys.stdin.reconfigure(encoding="utf-8")


def _is_ascii(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "ascii"
