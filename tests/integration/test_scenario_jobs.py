"""The samples of scenarios as jobs of one machine: each trains a few steps to its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.scenario_samples import SAMPLES, STEPS, shortened

import tinsmith
from tinsmith.recipes.scenarios.table import SCENARIOS
from tinsmith_local.made_models import make_model
from tinsmith_local.process import ServerProcess

TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinsmith.Client]:
    folder = tmp_path_factory.mktemp("scenarios")
    models = {name: make_model(name, folder) for name in ("tiny-2x64", "tiny-vl")}
    with (
        ServerProcess(folder / "server", models) as server,
        tinsmith.Client(server.address, server.api_key) as client,
    ):
        yield client


def test_every_scenario_has_a_sample() -> None:
    named = [shortened(sample)["spec"]["method"]["parameters"]["scenario"] for sample in SAMPLES]
    assert sorted(named) == sorted(SCENARIOS)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.stem)
def test_a_scenario_is_a_job_of_one_machine(client: tinsmith.Client, sample: Path) -> None:
    job = client.jobs.create("", manifest=shortened(sample))

    job = client.jobs.wait(job.name, TIMEOUT_S)

    assert job.phase == "Succeeded", (job.failure, *client.jobs.logs(job.name, tail_lines=20))
    assert job.status["progress"]["summary"] == f"{STEPS}/{STEPS}"
    name = shortened(sample)["spec"]["method"]["parameters"]["scenario"]
    adapters = {run.name: run.adapter for run in client.runs.list()}
    assert adapters[job.status["progress"]["run"]] == SCENARIOS[name].settings["adapter"]
