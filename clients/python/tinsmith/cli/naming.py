"""Short names: commands take what tables show, which have no room for whole paths."""

from __future__ import annotations

import re

from tinsmith.client import Client
from tinsmith.names import CheckpointName

_SHORT = re.compile(r"([^/]+)/(?:checkpoints/)?([^/]+)")


def whole_checkpoint(client: Client, name: str) -> str:
    """Return the resource name of a checkpoint that may be given as `run-1/final`."""
    match = _SHORT.fullmatch(name)
    return str(CheckpointName(client.project, match[1], match[2])) if match else name
