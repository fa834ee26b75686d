"""What a failure looks like on the command line: one line on stderr, with one remedy, no trace.

The remedies of the SDK are in the words of Python; here they are commands and options. The trace of
a bug is kept in a file, and shown with `TINSMITH_DEBUG=1`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from types import MappingProxyType

from tinsmith.errors import TinsmithError
from tinsmith.names import InvalidNameError

DEBUG = "TINSMITH_DEBUG"

_REMEDIES = MappingProxyType(
    {
        "MODEL_NOT_FOUND": "`tinsmith models list` shows those that are served",
        "RUN_NOT_FOUND": "`tinsmith runs list` shows those that there are",
        "CHECKPOINT_NOT_FOUND": "`tinsmith checkpoints list` shows those that there are",
        "KEY_NOT_FOUND": "`tinsmith keys list` shows those that there are",
        "JOB_NOT_FOUND": "`tinsmith jobs list` shows those that there are",
        "JOB_FINISHED": "submit another job",
        "KEY_MISSING": "set TINSMITH_API_KEY",
        "RESOURCE_ALREADY_EXISTS": "choose another name",
        "ENVIRONMENT_NOT_FOUND": "check the name given as environment",
    }
)
_ADVICE = re.compile(r"; (?:Get|List)[A-Z][A-Za-z]+ lists .*")
"""What servers add to messages in the words of the contract, and the remedy says anew."""
_SELF_EXPLAINED = frozenset({"INVALID_FIELD", "SEQUENCE_TOO_LONG"})
"""Reasons whose messages say after a semicolon what to do."""


def describe(error: Exception) -> str:
    """Return the line of a failure, without its trace.

    A bug is no failure that a user can do anything about but report: its line says where the trace
    is.
    """
    if isinstance(error, TinsmithError):
        return _describe_known(error)
    if isinstance(error, OSError):
        what = f"{error.filename}: " if error.filename is not None else ""
        return f"{what}{error.strerror or error}"
    if isinstance(error, InvalidNameError):
        return " ".join(str(error).split())
    return _describe_bug(error)


def report(error: Exception) -> None:
    """Print the line of a failure on stderr."""
    print(f"error: {describe(error)}", file=sys.stderr)


def _describe_known(error: TinsmithError) -> str:
    remedy = _REMEDIES.get(error.reason, error.remedy)
    message = " ".join(error.message.split())
    if remedy:
        message = _ADVICE.sub("", message)
    if error.reason in _SELF_EXPLAINED and "; " in message:
        remedy = ""
    label = f" ({error.reason})" if error.reason else ""
    return f"{message}{label}; {remedy}" if remedy else f"{message}{label}"


def _describe_bug(error: Exception) -> str:
    trace = "".join(traceback.format_exception(error))
    sentence = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="tinsmith-error-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(trace)
        where = f"the trace is in {Path(file.name)}"
    except OSError:
        where = f"{DEBUG}=1 shows the trace"
    return f"{sentence} (a bug of tinsmith); {where}"


def shows_traces() -> bool:
    """Return whether traces are wanted."""
    return os.environ.get(DEBUG, "") not in ("", "0")
