"""From alerts to Prometheus' rules, and to the runbook that their links lead to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from helm.observability.alerts import Alert
from helm.observability.run_alerts import RUN_ALERTS
from helm.observability.service_alerts import SERVICE_ALERTS

GROUPS: dict[str, Sequence[Alert]] = {
    "tinsmith-runs": RUN_ALERTS,
    "tinsmith-service": SERVICE_ALERTS,
}
ALERTS: Sequence[Alert] = (*RUN_ALERTS, *SERVICE_ALERTS)
INTERVAL_S = 15
_HEAD = "# Made by `make dashboards` from helm/observability: change that.\n"
_RUNBOOK = """# Runbook

Made by `make dashboards` from the alert rules (`helm/tinsmith/alerts/tinsmith.rules.yaml`).
Severity `critical` wants a person now, `warning` today; `info` is to be known. Alerts of runs are
for the owners of the runs: the service is well. Their windows are minutes, and several steps of
most loops; a loop whose steps take longer than two minutes is told late.
"""


def rules_text() -> str:
    """Return the file of rules, as Prometheus reads it."""
    groups = [
        {"name": name, "interval": f"{INTERVAL_S}s", "rules": [_rule(one) for one in alerts]}
        for name, alerts in GROUPS.items()
    ]
    return _HEAD + yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000)


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasts,
        "labels": {"severity": alert.severity, "team": alert.team},
        "annotations": {
            "summary": alert.says,
            "description": alert.means,
            "runbook": f"docs/runbook.md#{alert.name.lower()}",
        },
    }


def runbook_text() -> str:
    """Return docs/runbook.md."""
    lines = [_RUNBOOK]
    for title, alerts in (("Runs", RUN_ALERTS), ("Service", SERVICE_ALERTS)):
        lines.append(f"## {title}\n")
        for alert in alerts:
            held = "" if alert.lasts == "0m" else f" for {alert.lasts}"
            lines += [
                f"### {alert.name}\n",
                f"*{alert.severity}.* {alert.means} {alert.remedy}\n",
                f"```promql\n{alert.expression}\n```\n",
                f"Fires when that holds{held}.\n" if held else "Fires at once.\n",
            ]
    return "\n".join(lines)
