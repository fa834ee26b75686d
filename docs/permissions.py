"""Writes permissions.md: which role calls which method and route, from the tables of the code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tinsmith_gateway.access.permissions import HTTP_PERMISSIONS
from tinsmith_runtime.rpc.permissions import KEY_PERMISSIONS, POD_PERMISSIONS, KeyRole
from tinsmith_runtime.rpc.pod_identity import PodRole

PAGE = Path(__file__).parent / "permissions.md"
_HEAD = """# Who may call what

Generated from the code by `make docs`. The tables are `tinsmith_runtime/rpc/permissions.py` and
`tinsmith_gateway/access/permissions.py`. A call that they do not allow is refused with
`ROLE_MISSING` (`PERMISSION_DENIED`, 403) before its request is read.

A role says what its key calls at all. What it reaches is settled by names: a key reaches the
resources of its own project, and published checkpoints. What is of another project is answered as
if it did not exist (`NOT_FOUND`). Revoked and expired keys are refused (`KEY_REVOKED`,
`KEY_EXPIRED`), by each pod within 2 s.

- **viewer** reads everything but keys and audit events, and changes nothing.
- **agent** samples, steps environments, claims and submits episodes. The key of a job's players is
  one.
- **member** trains, keeps checkpoints, runs jobs. The key of a job's driver is one.
- **admin** manages keys and reads audit events besides.

Keys of pods belong to no project. A pod calls with its own key what is listed for it here, and
shows the client's key for everything else. Health checks need no key.
"""


def _marks(roles: Iterable[object], having: Iterable[object]) -> str:
    present = set(having)
    return " | ".join("x" if role in present else "" for role in roles)


def page() -> str:
    """Return the text of the page."""
    lines = [_HEAD]
    services = sorted({method.split("/")[1] for method in KEY_PERMISSIONS})
    pods = sorted(PodRole)
    for service in services:
        lines += [
            f"\n## {service}\n",
            f"| method | {' | '.join(KeyRole)} | pods |",
            f"| --- |{' --- |' * (len(KeyRole) + 1)}",
        ]
        for method, access in KEY_PERMISSIONS.items():
            if method.split("/")[1] == service:
                callers = ", ".join(pod for pod in pods if method in POD_PERMISSIONS[pod])
                name = method.rpartition("/")[2]
                lines.append(f"| `{name}` | {_marks(KeyRole, access)} | {callers} |")
    lines += [
        "\n## HTTP\n",
        f"| route | {' | '.join(KeyRole)} |",
        f"| --- |{' --- |' * len(KeyRole)}",
    ]
    for (method, path), access in sorted(HTTP_PERMISSIONS.items(), key=lambda row: row[0][::-1]):
        lines.append(f"| `{method} {path}` | {_marks(KeyRole, access)} |")
    return "\n".join(lines) + "\n"
