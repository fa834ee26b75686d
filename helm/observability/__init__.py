"""Grafana dashboards, alert rules and the runbook: written from Python, committed as files.

The modules of `dashboards` and `alerts.py` say what is shown and what is told; `panels.py` and
`rules.py` write it. `python -m helm.observability` writes all files, `--check` fails if one is
stale. What they name is declared in the pods' `metrics.py` (a test holds that).
"""
