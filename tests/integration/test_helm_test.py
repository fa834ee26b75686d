"""The program of `helm test`, as its pod runs it, against all services in this process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.fakes.chart_harness import load_values, of_kind, render
from tests.integration.servers import Deployment


def run(address: str, api_key: str) -> subprocess.CompletedProcess[str]:
    [pod] = of_kind(render(load_values("external-values")), "Pod")
    [container] = pod["spec"]["containers"]
    assert container["command"] == ["python", "-c"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-c", *container["args"]],
        env={**kept, "TINSMITH_ADDRESS": address, "TINSMITH_API_KEY": api_key},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_it_tells_health_and_what_models_can_do(embedded: Deployment) -> None:
    done = run(embedded.address, embedded.api_key)
    assert done.returncode == 0, done.stderr
    assert '/healthz: {"status":"ok"}' in done.stdout
    assert "trainable=True, sampleable=True" in done.stdout
    assert "base models that are served: 1" in done.stdout


@pytest.mark.parametrize("key", ["", "tsk_wrong"])
def test_it_fails_where_the_key_is_wrong(embedded: Deployment, key: str) -> None:
    done = run(embedded.address, key)
    assert done.returncode != 0
