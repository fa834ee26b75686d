"""A real Prometheus, as Debian ships it, on the folder that `make grafana` writes."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helm.observability.laptop import write_folder

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
def scraping(work: Path, targets: Sequence[str], *, interval_s: int = 1) -> Iterator[Prometheus]:
    """Run a Prometheus with the rules of the chart while it scrapes addresses of metrics."""
    tool = shutil.which("prometheus")
    if tool is None:
        raise RuntimeError("prometheus is missing; on Debian: apt-get install prometheus")
    address = f"127.0.0.1:{free_port()}"
    write_folder(work, targets=targets, prometheus=address, interval_s=interval_s)
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
            return len(server.query("up == 1")) == len(targets)
        except OSError:
            return False

    try:
        until(is_scraping, timeout_s=_TIMEOUT_S)
        yield server
    finally:
        process.terminate()
        process.wait(_TIMEOUT_S)
