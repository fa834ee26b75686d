"""The project that the current task works for: what shares things out asks for it.

The edge of a pod binds it when it knows the caller; tasks that a call starts inherit it. Work that
belongs to none, such as the commit of a cycle of several projects, has the empty one.
"""

from __future__ import annotations

from contextvars import ContextVar

_project: ContextVar[str] = ContextVar("tinsmith_tenant", default="")


def bind_tenant(project: str) -> None:
    """Set the project of the current task; empty for the work of pods."""
    _project.set(project)


def current_tenant() -> str:
    """Return the project that the current task works for; empty for none."""
    return _project.get()
