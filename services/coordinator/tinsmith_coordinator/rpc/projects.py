"""The tenant of a call: a project of another caller is answered as if there were none."""

from __future__ import annotations

from tinsmith.names import ProjectName
from tinsmith_runtime.errors import NotFoundError
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.requests import parse_name


def own_project(parent: str) -> str:
    """Return the id of the project of the caller that a request names.

    Raises:
        InvalidFieldError: If it names none.
        NotFoundError: If it is of another caller.
    """
    project = parse_name(ProjectName, parent, "parent").project
    current_caller().require_project(
        project, lambda: NotFoundError(f"project {project} does not exist", parent=project)
    )
    return project
