"""A list of runs says which trainer holds them, what goes on in them, and what they wait for."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tests.integration.servers import BASE_MODEL, Deployment, EmbeddedThread
from tests.support.wait import until

import tinsmith
from tinsmith import cli

DATUM = tinsmith.Datum(
    tinsmith.ModelInput.from_ints([5, 6, 7]),
    {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
)


def find(client: tinsmith.Client, run: tinsmith.TrainingRun) -> tinsmith.TrainingRunInfo:
    [found] = [each for each in client.runs.list() if each.name == run.name]
    return found


def test_a_list_says_what_a_run_waits_for(make_embedded: Callable[..., EmbeddedThread]) -> None:
    server = make_embedded()
    deployment = server.start()
    with deployment.client() as client:
        other = client.create_lora_training_run(BASE_MODEL, rank=4)
        run = client.create_lora_training_run(BASE_MODEL, rank=4)
        with server.engine_held():
            first = other.forward_backward([DATUM])
            until(lambda: find(client, other).activity == "working")
            futures = [run.forward_backward([DATUM]) for _ in range(17)]
            until(lambda: find(client, run).num_pending_operations == 17)
            info = find(client, run)
            assert info.worker == "workers/trainer-0"
            assert (info.state, info.activity) == ("active", "waiting")
            assert info.waiting_for
            with deployment.client() as second:
                later = second.runs.get(run.name).pending_operations
                until(lambda: all(future.metadata is not None for future in later))
                assert [future.metadata.queue_position for future in later if future.metadata] == [
                    *range(17)
                ]
        for future in (first, *futures):
            future.result()
        assert find(client, run).activity == "idle"
    with deployment.client() as client:
        until(lambda: find(client, run).activity == "parked")


def test_the_table_has_the_trainer_and_what_is_waited_for(
    embedded: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINSMITH_ADDRESS", embedded.address)
    monkeypatch.setenv("TINSMITH_API_KEY", embedded.api_key)
    monkeypatch.setenv("COLUMNS", "200")
    with embedded.client() as client:
        client.create_lora_training_run(BASE_MODEL, rank=4)
        for arguments in (["runs", "list"], ["runs", "list", "--json"]):
            with pytest.raises(SystemExit) as caught:
                cli.main(arguments)
            assert not caught.value.code
            text = capsys.readouterr().out
            if "--json" in arguments:
                assert json.loads(text)[0]["activity"] == "idle"
            else:
                for heading in ("ACTIVITY", "PENDING", "TRAINER", "WAITING FOR"):
                    assert heading in text
                assert "workers/trainer-0" in text
