"""What a chat template can read: lists of parts, and arguments of tool calls as text.

Two inputs are adapted to the template, and neither changes what the model sees. A template that
does not look into lists of parts gets their texts joined. Arguments of former tool calls stay a
string for a template that writes strings; they become an object for one that would quote it.
"""

from __future__ import annotations

import json
import re
from typing import Any

_READS_PARTS = re.compile(r"\bin\s+(?:\w+\.content\b|\w+\[['\"]content['\"]\]|content\b)")
_READS_STRING_ARGUMENTS = re.compile(r"arguments\s+is\s+string")


def reads_parts(template: str) -> bool:
    """Return whether a template looks into contents that are lists of parts."""
    return _READS_PARTS.search(template) is not None


def adapt_arguments(message: dict[str, Any], template: str) -> None:
    """Make objects of a message's arguments of tool calls, unless the template writes strings."""
    if _READS_STRING_ARGUMENTS.search(template) is not None:
        return
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                parsed = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                continue
            if isinstance(parsed, dict):
                function["arguments"] = parsed
