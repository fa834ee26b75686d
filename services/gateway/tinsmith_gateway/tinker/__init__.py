"""The wire of the `tinker` SDK, 0.38."""

from __future__ import annotations

from starlette.routing import BaseRoute

from tinsmith_gateway.services import Services


def routes(services: Services) -> list[BaseRoute]:
    """Return the routes below `/api/v1`."""
    del services
    return []
