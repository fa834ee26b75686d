"""A real Prometheus, as Debian ships it, that scrapes one endpoint."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.observability.promtool import RULES
from tests.support.wait import until
from tinsmith_local.process import free_port

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Where it answers."""

    address: str

    def query(self, expression: str) -> list[Mapping[str, Any]]:
        """Return the series that an expression answers with now."""
        found: list[Mapping[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def query_range(
        self, expression: str, *, start_s: float, end_s: float, step_s: float
    ) -> list[Mapping[str, Any]]:
        """Return the series of an expression over a time."""
        answer = self._get("query_range", query=expression, start=start_s, end=end_s, step=step_s)
        found: list[Mapping[str, Any]] = answer["result"]
        return found

    def rules(self) -> list[Mapping[str, Any]]:
        """Return the alert rules, with how their last evaluation went."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, what: str, **fields: Any) -> Any:
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)["data"]


@contextlib.contextmanager
def scraping(work: Path, target: str, *, interval_s: int = 1) -> Iterator[Prometheus]:
    """Run a Prometheus with the chart's rules while it scrapes a target."""
    tool = shutil.which("prometheus")
    if tool is None:
        raise RuntimeError("prometheus is missing; on Debian: apt-get install prometheus")
    config = {
        "global": {"scrape_interval": f"{interval_s}s", "evaluation_interval": "5s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "tinsmith-metrics", "static_configs": [{"targets": [target]}]}
        ],
    }
    (work / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (work / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                tool,
                f"--config.file={work / 'prometheus.yml'}",
                f"--storage.tsdb.path={work / 'tsdb'}",
                f"--web.listen-address={address}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    server = Prometheus(address)

    def is_scraping() -> bool:
        if process.poll() is not None:
            raise RuntimeError((work / "prometheus.log").read_text())
        try:
            return any(float(one["value"][1]) == 1 for one in server.query("up"))
        except OSError:
            return False

    try:
        until(is_scraping, timeout_s=_TIMEOUT_S)
        yield server
    finally:
        process.terminate()
        process.wait(_TIMEOUT_S)
