"""A list of runs says which trainer holds them, what goes on in them, and what they wait for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.servers import BASE_MODEL, Deployment, EmbeddedThread
from tests.support.wait import until

import tinsmith
from tinsmith import cli
from tinsmith.recipes import supervised
from tinsmith.recipes.experiment.observer import Observer

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
            until(lambda: find(client, other).num_pending_operations == 1)
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
        assert find(client, run).activity == "training"
    with deployment.client() as client:
        until(lambda: find(client, run).activity == "idle")


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
                assert json.loads(text)[0]["activity"] == "training"
            else:
                for heading in ("STATE", "PENDING", "TRAINER", "WAITING FOR"):
                    assert heading in text
                assert "workers/trainer-0" in text


def step(run: tinsmith.TrainingRun) -> None:
    run.forward_backward([DATUM])
    run.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()


def test_a_loop_says_that_it_is_done_and_another_step_undoes_it(embedded: Deployment) -> None:
    with embedded.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4)
        step(run)
        # What is still under way belongs to the training.
        run.forward_backward([DATUM])
        last = run.optim_step(tinsmith.AdamParams(learning_rate=1e-3))
        run.finish()
        run.finish()
        last.result()
        # The reports of these steps come about a second later, and undo nothing.
        until(lambda: last_step(client, run) == 1)
        assert find(client, run).activity == "finished"
        first_time = find(client, run).finish_time
        assert first_time is not None
        # A score is no step.
        run.forward([DATUM]).result()
        until(lambda: find(client, run).activity == "finished")
        step(run)
        until(lambda: last_step(client, run) == 2)
        assert (find(client, run).activity, find(client, run).finish_time) == ("training", None)


def last_step(client: tinsmith.Client, run: tinsmith.TrainingRun) -> int:
    found = client.runs.list_metrics(["trainer/grad_norm"], run=run.name)
    return max((metric.step for metric in found), default=-1)


def test_a_run_that_went_back_to_an_earlier_step_is_finished_no_more(embedded: Deployment) -> None:
    with embedded.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4)
        saved = run.save_state("begin").result()
        for _ in range(3):
            step(run)
        run.finish()
        run.load_state_with_optimizer(saved).result()
        # Its version is one that was there before the finish; its operation is not.
        step(run)
        assert run.version == 1
        until(lambda: find(client, run).activity == "training")


async def test_a_run_is_reopened_in_another_client(embedded: Deployment) -> None:
    with embedded.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4)
        await run.finish_async()
    with embedded.client() as client:
        until(lambda: find(client, run).activity == "finished")
        again = client.runs.get(run.name)
        assert again.info.finish_time is not None
        await again.reopen_async()
        assert find(client, run).activity == "training"
    with embedded.client() as client:
        until(lambda: find(client, run).activity == "idle")
        gone = client.runs.get(run.name)
        client.runs.delete(run.name)
        for call in (gone.finish, gone.reopen):
            with pytest.raises(tinsmith.NotFoundError):
                call()


def test_a_recipe_finishes_its_run_and_trains_it_again(
    make_embedded: Callable[..., EmbeddedThread],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    few_rows: Path,
) -> None:
    server = make_embedded()
    deployment = server.start()
    monkeypatch.setenv("TINSMITH_ADDRESS", deployment.address)
    monkeypatch.setenv("TINSMITH_API_KEY", deployment.api_key)
    monkeypatch.setenv("COLUMNS", "200")
    config = supervised.Config(
        data=str(few_rows),
        rank=2,
        num_steps=2,
        batch_size=4,
        max_tokens=4,
        output_dir=tmp_path / "experiment",
    )

    def states() -> list[str]:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            cli.main(["runs", "list"])
        heading, *rows = capsys.readouterr().out.splitlines()
        begin = heading.index("STATE")
        return [row[begin:].split()[0] for row in rows]

    with deployment.client() as client:
        supervised.main(config, client)
        assert states() == ["finished"]
    assert states() == ["finished"]
    experiment_run = json.loads((tmp_path / "experiment" / "config.json").read_text())["run"]
    longer = dataclasses.replace(config, num_steps=4)
    seen: list[str] = []

    class Watching(Observer):
        """Looks at the list once the run goes on, between its operations."""

        def began(self, run: str, first_step: int) -> None:
            seen.extend(states())

    with deployment.client() as client:
        supervised.main(longer, client, Watching())
        assert seen == ["training"]
        assert states() == ["finished"]
    with pytest.raises(SystemExit):
        cli.main(["runs", "show", experiment_run])
    shown = capsys.readouterr().out
    assert "state: finished" in shown
    assert "activity" not in shown
