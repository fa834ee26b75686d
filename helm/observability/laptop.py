"""A folder that a Prometheus and a Grafana of a laptop take as it is.

`python -m helm.observability.laptop FOLDER` writes it, and prints how both are started.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml
from helm.observability.dashboards import DASHBOARDS
from helm.observability.panels import to_json
from helm.observability.rules import INTERVAL_S, rules_text

METRICS_ADDRESS = "127.0.0.1:9464"
PROMETHEUS_ADDRESS = "127.0.0.1:9090"
_JOB = "tinsmith"


def write_folder(
    folder: Path,
    *,
    targets: Sequence[str] = (METRICS_ADDRESS,),
    prometheus: str = PROMETHEUS_ADDRESS,
    interval_s: int = INTERVAL_S,
) -> None:
    """Write settings, rules, dashboards and what Grafana is provisioned by.

    Args:
        folder: Is made; files of the same names are written anew, data beside them stay.
        targets: Addresses of metrics, `host:port`.
        prometheus: Where Grafana finds Prometheus, `host:port`.
        interval_s: Between two scrapes.
    """
    files = {f"dashboards/{page.uid}.json": to_json(page) for page in DASHBOARDS}
    files["tinsmith.rules.yaml"] = rules_text()
    settings = {
        "prometheus.yml": {
            "global": {
                "scrape_interval": f"{interval_s}s",
                "evaluation_interval": f"{INTERVAL_S}s",
            },
            # Beside this file: Prometheus looks from its own folder.
            "rule_files": ["tinsmith.rules.yaml"],
            "scrape_configs": [{"job_name": _JOB, "static_configs": [{"targets": [*targets]}]}],
        },
        "provisioning/datasources/tinsmith.yaml": {
            "apiVersion": 1,
            "datasources": [
                {
                    "name": "Tinsmith",
                    "uid": "tinsmith",
                    "type": "prometheus",
                    "access": "proxy",
                    "url": f"http://{prometheus}",
                    "isDefault": True,
                    "jsonData": {"timeInterval": f"{interval_s}s"},
                }
            ],
        },
        "provisioning/dashboards/tinsmith.yaml": {
            "apiVersion": 1,
            "providers": [
                {
                    "name": "Tinsmith",
                    "folder": "Tinsmith",
                    "type": "file",
                    # Grafana would look from its home.
                    "options": {"path": str((folder / "dashboards").resolve())},
                }
            ],
        },
    }
    texts = {name: yaml.safe_dump(value, sort_keys=False) for name, value in settings.items()}
    for name, text in (files | texts).items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def commands(folder: Path) -> Sequence[str]:
    """Return what is run from the current folder, each in a terminal of its own."""
    return (
        f"tinsmith up --metrics-address {METRICS_ADDRESS}",
        f"prometheus --config.file={folder}/prometheus.yml --storage.tsdb.path={folder}/data "
        f"--web.listen-address={PROMETHEUS_ADDRESS}",
        f"GF_PATHS_PROVISIONING={folder.resolve()}/provisioning grafana server "
        "--homepath /usr/share/grafana",
    )


def main() -> None:
    """Write the folder and say what comes next."""
    parser = argparse.ArgumentParser(prog="make grafana", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    write_folder(folder)
    print(f"{folder} has Prometheus' settings and rules, and {len(DASHBOARDS)} dashboards. Start:")
    for command in commands(folder):
        print(f"  {command}")
    print(
        f"Then open http://127.0.0.1:3000/d/{DASHBOARDS[0].uid} (a new Grafana has admin, admin)."
    )


if __name__ == "__main__":
    main()
