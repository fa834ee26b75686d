"""What a recipe tells the server of its run: that it is finished, or goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.sdk_fake_server import FakeServer

import tinsmith
from tinsmith.recipes import supervised
from tinsmith.recipes.experiment.experiment import Experiment
from tinsmith.recipes.experiment.resume import ResumableRun, continue_from


@pytest.fixture
def old_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tinsmith.Client]:
    """A client of a server that does not know how to finish runs."""
    monkeypatch.setenv("TINSMITH_STATE_DIR", str(tmp_path / "state"))
    server = FakeServer()
    try:
        with tinsmith.Client(server.address, "tsk_test") as client:
            yield client
    finally:
        server.stop()


def test_a_server_of_an_earlier_release_costs_a_sentence(
    old_client: tinsmith.Client, tmp_path: Path
) -> None:
    config = supervised.Config(output_dir=tmp_path / "experiment")
    said: list[str] = []
    with Experiment("supervised", config) as experiment:
        progress = ResumableRun(config, old_client, experiment)
        with pytest.raises(tinsmith.TinsmithError) as refused:
            progress.run.finish()
        assert refused.value.reason == "METHOD_UNKNOWN"
        progress.finish({"loss": 1.0}, said.append)
    assert json.loads((tmp_path / "experiment" / "summary.json").read_text()) == {"loss": 1.0}
    [sentence] = said
    assert sentence.startswith(f"the server did not note that {progress.run.name} is finished: ")


def test_each_partner_is_finished_also_behind_one_that_is_not(
    old_client: tinsmith.Client, tmp_path: Path
) -> None:
    finished: list[str] = []
    partner: Any = SimpleNamespace(name="partner", finish=lambda: finished.append("partner"))
    config = supervised.Config(output_dir=tmp_path / "experiment")
    with Experiment("supervised", config) as experiment:
        progress = ResumableRun(config, old_client, experiment)
        progress.finish({}, lambda _: None, partner)
    assert finished == ["partner"]


def test_a_run_goes_on_from_a_checkpoint_of_an_earlier_server(
    old_client: tinsmith.Client,
) -> None:
    run = old_client.create_lora_training_run("tiny")
    saved = run.save_state("half").result()
    assert continue_from(old_client, run.name, saved.name).name == run.name
