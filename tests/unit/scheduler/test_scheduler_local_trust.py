"""Jobs as processes of the scheduler's machine: at which addresses, and with which variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.variables import allowed_variables, parse_variables
from tinsmith_scheduler.config import SchedulerConfig


def config(folder: Path, **settings: Any) -> SchedulerConfig:
    return SchedulerConfig(data_dir=folder, pod_key="k" * 32, **settings)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3", "server.example.com"])
def test_jobs_of_this_machine_are_refused_where_others_reach_it(tmp_path: Path, host: str) -> None:
    settings = {"job_launcher": "local", "listen_address": f"{host}:7070"}
    with pytest.raises(ConfigError, match="set allow_remote_jobs"):
        config(tmp_path, **settings)
    assert config(tmp_path, allow_remote_jobs=True, **settings).allow_remote_jobs
    assert not config(tmp_path, listen_address=f"{host}:7070").job_launcher


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_jobs_of_this_machine_are_run_on_loopback(tmp_path: Path, host: str) -> None:
    made = config(tmp_path, job_launcher="local", listen_address=f"{host}:7070")
    assert made.job_launcher == "local"


def test_programs_get_variables_by_name_alone() -> None:
    secrets = dict.fromkeys(["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SSH_AUTH_SOCK", "X"], "s")
    source = {"PATH": "/bin", "TINSMITH_POD_KEY": "s", **secrets}
    assert allowed_variables(source, frozenset()) == {"PATH": "/bin"}
    assert allowed_variables(source, frozenset({"X"})) == {"PATH": "/bin", "X": "s"}


def test_the_pods_own_variables_cannot_be_named(tmp_path: Path) -> None:
    assert parse_variables("job_variables", " A,B ,") == {"A", "B"}
    with pytest.raises(ConfigError, match="TINSMITH_POD_KEY is the pod's own"):
        config(tmp_path, job_variables="A,TINSMITH_POD_KEY")
