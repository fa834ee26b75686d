"""What is told of a pod that ended or cannot start, as one sentence.

The kubelet tells it in several places: a reason of the pod, a reason of a container, and what the
container wrote into its termination log or, if that is empty, at the end of its log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_PROBLEM = 1024
"""Characters of a sentence."""
_FRAME = re.compile(r'\s+File ".*", line \d+')
_MARGIN = re.compile(r"^\s*\| ?")
"""Of an exception group."""
_LOG_LINE = re.compile(r"\{|\[|\d{4}-|(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\w+: ")
_FATAL, _EXTENSIONS = "Fatal Python error", "Extension modules: "
"""How the report begins and ends that a process leaves which native code aborted."""
_MAX_ERROR_LINES = 5


def outcome(status: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return the exit code and the problem of a pod: of the container that is worst off."""
    told = ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
    entries = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    ended = [
        entry["state"]["terminated"]
        for entry in entries
        if (entry.get("state") or {}).get("terminated")
    ]
    bad = [entry for entry in ended if entry.get("exitCode")]
    for entry in bad or ended[:1]:
        reason = str(entry.get("reason") or "")
        named = "" if reason in ("Error", "Completed") else reason
        text = _sentence(str(entry.get("message") or ""))
        problem = told or ": ".join(filter(None, (named, text)))
        return int(entry.get("exitCode") or 0), problem[:MAX_PROBLEM]
    for entry in entries:
        waiting = (entry.get("state") or {}).get("waiting") or {}
        reason, text = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return None, f"{reason}: {text}"[:MAX_PROBLEM] if text else reason
    return None, told[:MAX_PROBLEM]


def _sentence(text: str) -> str:
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
