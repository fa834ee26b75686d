"""The trainer as two processes under torchrun: trains as one does, and survives the loss of one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load
from tests.integration.servers import (
    BASE_MODEL,
    TIMEOUT_S,
    Deployment,
    PodProcess,
    free_port,
    weight_files,
)

import tinsmith
from tinsmith_runtime.rpc.auth import ApiKey

ADAM = tinsmith.AdamParams(learning_rate=1e-2)
# Full weights differ in the order of sums between FSDP's module and the engine's own decoder.
FULL_TOLERANCE = 1e-5


@dataclass(frozen=True)
class RankedDeployment(Deployment):
    """A scheduler, and a trainer of two ranks."""

    torchrun: subprocess.Popen[bytes]
    log: Path

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank."""
        for child in psutil.Process(self.torchrun.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.environ().get("RANK") == str(number):
                    return child
        raise AssertionError(f"rank {number} does not run: {self.log.read_text()}")


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[RankedDeployment]:
    folder = tmp_path_factory.mktemp("ranked")
    address, api_key = f"127.0.0.1:{free_port()}", str(ApiKey.generate())
    shared = {
        "POD_KEY": "pod-key-of-the-tests",
        "SCHEDULER_ADDRESS": address,
        "BASE_MODELS": f"{BASE_MODEL}={model_dir}",
        "STORAGE_URI": f"file://{folder / 'store'}",
        "DRAIN_TIMEOUT_S": "5",
    }
    scheduler = {
        **shared,
        "DATA_DIR": str(folder / "scheduler"),
        "BOOTSTRAP_KEY": api_key,
        "LISTEN_ADDRESS": address,
    }
    trainer = {
        **shared,
        "DATA_DIR": str(folder / "trainer"),
        "LISTEN_ADDRESS": f"127.0.0.1:{free_port()}",
        "NUM_THREADS": "1",
        "SHARD_BASE": "true",
        "RANK_TIMEOUT_S": "20",
    }
    log = folder / "torchrun.log"
    with PodProcess("scheduler", folder, scheduler), _torchrun(trainer, log) as torchrun:
        deployment = RankedDeployment(address, api_key, model_dir, torchrun, log)
        _wait_until_served(deployment)
        yield deployment


@contextlib.contextmanager
def _torchrun(settings: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    inherited = {key: value for key, value in os.environ.items() if "TINSMITH_" not in key}
    variables = {f"TINSMITH_{key}": value for key, value in settings.items()}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("--max-restarts", "2", "--monitor-interval", "0.1", "-m", "tinsmith_trainer"),
    ]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            env={**inherited, **variables, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=stream,
            stderr=stream,
        )
    children: list[psutil.Process] = []
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            for child in children:
                with contextlib.suppress(psutil.Error):
                    child.kill()


def _wait_until_served(deployment: RankedDeployment) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    with deployment.client() as client:
        while not any(model.trainable for model in client.list_models()):
            assert deployment.torchrun.poll() is None, deployment.log.read_text()
            assert time.monotonic() < deadline_s, deployment.log.read_text()
            threading.Event().wait(0.05)


def make_datum(seed: int, num_tokens: int = 24) -> tinsmith.Datum:
    tokens = np.random.default_rng(seed).integers(3, 200, num_tokens + 1)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(num_tokens)}
    return tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)


def train(
    run: tinsmith.TrainingRun, steps: range
) -> list[tinsmith.OperationFuture[tinsmith.OptimStepResponse]]:
    updates = []
    for step in steps:
        run.forward_backward([make_datum(10 * step + number) for number in range(4)])
        updates.append(run.optim_step(ADAM))
    return updates


def weights(run: tinsmith.TrainingRun, name: str) -> dict[str, torch.Tensor]:
    files = weight_files(run.save_state(name).result())
    return {
        f"{file}/{key}": tensor
        for file, content in files.items()
        for key, tensor in load(content).items()
    }


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_two_ranks_serve_and_survive_the_loss_of_one(
    ranked: RankedDeployment, embedded: Deployment
) -> None:
    with embedded.client() as client:
        lora = client.create_lora_training_run(BASE_MODEL, rank=8, seed=3)
        full = client.create_full_training_run(BASE_MODEL)
        train(lora, range(6))
        train(full, range(3))
        wanted = weights(lora, "wanted")
        wanted_full = weights(full, "wanted")

    with ranked.client() as client:
        lora = client.create_lora_training_run(BASE_MODEL, rank=8, seed=3)
        full = client.create_full_training_run(BASE_MODEL)
        before = train(lora, range(3))
        assert [update.result().version for update in before] == [1, 2, 3]
        updates = train(full, range(3))
        assert [update.result().version for update in updates] == [1, 2, 3]
        found_full = weights(full, "found")
        assert found_full.keys() == wanted_full.keys()
        for name, tensor in wanted_full.items():
            if name.startswith("model"):
                error = (found_full[name] - tensor).norm() / tensor.norm()
                assert error <= FULL_TOLERANCE, name

        # Accepted operations are computed by the ranks that run after the loss.
        follower = ranked.rank(1)
        during = train(lora, range(3, 6))
        follower.kill()
        assert [update.result().version for update in during] == [4, 5, 6]
        assert ranked.rank(1).pid != follower.pid
        # One piece for each batch: the bits of two ranks are those of one process.
        assert_equal(weights(lora, "found"), wanted)
        assert_equal(weights(full, "again"), found_full)


def test_a_sigterm_stops_all_ranks_cleanly(ranked: RankedDeployment) -> None:
    processes = [ranked.rank(0), ranked.rank(1)]
    before = len(ranked.log.read_text())
    ranked.torchrun.terminate()
    ranked.torchrun.wait(30)
    assert not any(process.is_running() for process in processes)
    text = ranked.log.read_text()[before:]
    assert "waiting for rank 0 to stop" in text
    assert '"event": "stopped"' in text
    assert "ranks lost" not in text
    assert "forcefully" not in text
