"""A client for a command that a person waits for."""

from __future__ import annotations

from tinsmith.client import Client
from tinsmith.settings import RetryPolicy

_PATIENCE_S = 10.0


def connect(display_name: str) -> Client:
    """Return a client that says within seconds that the server is away."""
    return Client(display_name=display_name, retry=RetryPolicy(budget_s=_PATIENCE_S))
