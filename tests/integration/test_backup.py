"""A data directory that is copied, moved or restored serves everything that it held."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.servers import BASE_MODEL, Deployment, EmbeddedThread, embedded_server
from tests.support.code_blocks import blocks_of

import tinsmith

GREEDY = tinsmith.SamplingParams(max_tokens=8, temperature=0.0)
DATUM = tinsmith.Datum(
    tinsmith.ModelInput.from_ints([5, 6, 7]),
    {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
)


def commands() -> list[str]:
    """Return the blocks of the page on backups: of a stopped server, and of a running one."""
    return [block.code for block in blocks_of("docs/backup.md")]


def run_command(text: str, source: Path, target: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "DATA": str(source), "BACKUP": str(target)}
    subprocess.run(["bash", "-euc", text], env=variables, check=True)


def train(run: tinsmith.TrainingRun) -> int:
    run.forward_backward([DATUM]).result()
    return run.optim_step(tinsmith.AdamParams(learning_rate=1e-2)).result().version


def tokens_of(client: tinsmith.Client, checkpoint: str) -> list[int]:
    prompt = tinsmith.ModelInput.from_ints([5, 6])
    sampler = client.create_sampler(checkpoint=checkpoint)
    return list(sampler.sample(prompt, sampling_params=GREEDY).result().sequences[0].tokens)


@pytest.fixture
def served(tmp_path: Path, model_dir: Path) -> Iterator[tuple[EmbeddedThread, Deployment]]:
    server = EmbeddedThread(tmp_path / "data", model_dir)
    try:
        yield server, server.start()
    finally:
        server.stop()


def test_backups_are_served_where_they_lie(
    served: tuple[EmbeddedThread, Deployment], tmp_path: Path, model_dir: Path
) -> None:
    server, deployment = served
    stopped_copy, running_copy = commands()
    data, online, moved = tmp_path / "data", tmp_path / "on line", tmp_path / "moved"
    with deployment.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4, seed=1)
        train(run)
        saved = run.save_state("first").result()
        expected = tokens_of(client, saved.name)
        exported = client.checkpoints.export(saved.name, "peft").result()
        assert str(data) in exported.manifest_uri
        run_command(running_copy, data, online)
        train(run)
        later = run.save_weights_for_sampler("later").result()
        tokens = {saved.name: expected, later.name: tokens_of(client, later.name)}
    server.stop()
    run_command(stopped_copy, data, moved)
    shutil.rmtree(data)

    for folder, names in ((online, [saved.name]), (moved, list(tokens))):
        with embedded_server(folder, model_dir) as other, other.client() as client:
            # The key is that of the first server: no other client has to be told.
            assert other.api_key == deployment.api_key
            found = client.checkpoints.list()
            assert {checkpoint.name for checkpoint in found} == set(names)
            for checkpoint in found:
                assert f"{folder.resolve().name.replace(' ', '%20')}/" in checkpoint.manifest_uri
            for name in names:
                assert tokens_of(client, name) == tokens[name]
            again = client.checkpoints.export(saved.name, "peft").result()
            assert str(data) not in again.manifest_uri
            continued = client.runs.get(run.name)
            assert train(continued) == len(names) + 1
            continued.load_state_with_optimizer(saved).result()
            assert train(continued) == 2
            client.checkpoints.download(saved.name, tmp_path / f"files of {folder.name}")
