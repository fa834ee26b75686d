"""The termination message of a container or process, as one sentence.

A program writes the message itself, or the end of its log stands in for it: then the sentence is
the error of a traceback, the problem of a log line, or the last line.
"""

from __future__ import annotations

import json
import re

MAX_PROBLEM = 1024
"""Characters of a sentence."""
_FRAME = re.compile(r'\s+File ".*", line \d+')
_MARGIN = re.compile(r"^\s*\| ?")
"""Of an exception group."""
_LOG_LINE = re.compile(r"\{|\[|\d{4}-|(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\w+: ")
_FATAL, _EXTENSIONS = "Fatal Python error", "Extension modules: "
"""How the report begins and ends that a process leaves which native code aborted."""
_MAX_ERROR_LINES = 5


def describe_termination(text: str) -> str:
    """Return what a termination message comes to.

    That of a program which left none is the end of its log: the error of a traceback, or else the
    last line. Of a log line of ours it is the problem that the line is about.
    """
    lines = [_MARGIN.sub("", line) for line in text.splitlines() if line.strip()]
    if lines and lines[-1].startswith(_EXTENSIONS):
        fatal = next((line for line in lines if line.startswith(_FATAL)), _FATAL)
        return f"{fatal}; its log has the stacks"
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return _problem_of(lines[-1]) if lines else ""
    rest = [line for line in lines[frames[-1] + 1 :] if not line.strip().startswith("+-")]
    start = next((n for n, line in enumerate(rest) if not line.startswith(" ")), None)
    if start is None:
        return " ".join(lines[-1].split())
    error = rest[start : start + _MAX_ERROR_LINES]
    end = next((n for n, line in enumerate(error) if n and _LOG_LINE.match(line)), len(error))
    return " ".join(" ".join(error[:end]).split())


def _problem_of(line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or "event" not in entry:
        return " ".join(line.split())
    return ": ".join(str(entry[key]) for key in ("event", "problem") if entry.get(key))
