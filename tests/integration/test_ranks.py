"""The trainer as two processes under torchrun: trains as one does, and survives the loss of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load
from tests.integration.servers import (
    BASE_MODEL,
    Deployment,
    weight_files,
)
from tests.support.pods import PodDeployment, PodProcess

import tinsmith
from tinsmith_local.process import free_port

ADAM = tinsmith.AdamParams(learning_rate=1e-2)
TORCHRUN = (
    *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
    *("--max-restarts", "2", "--monitor-interval", "0.1"),
)
# Full weights differ in the order of sums between FSDP's module and the engine's own decoder.
FULL_TOLERANCE = 1e-5


@dataclass(frozen=True)
class RankedDeployment(Deployment):
    """A scheduler, and a trainer of two ranks."""

    torchrun: PodProcess

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank."""
        for child in psutil.Process(self.torchrun.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.environ().get("RANK") == str(number):
                    return child
        raise AssertionError(f"rank {number} does not run: {self.torchrun.log.read_text()}")


class _Torchrun(PodProcess):
    """Ends with its ranks, which have groups of their own."""

    _ranks: Sequence[psutil.Process] = ()

    def terminate(self) -> None:
        """Ask it to end, and note its ranks, which may outlive it."""
        self._note_ranks()
        super().terminate()

    def kill(self) -> None:
        """Kill it and its ranks."""
        self._note_ranks()
        super().kill()
        for rank in self._ranks:
            with contextlib.suppress(psutil.Error):
                rank.kill()

    def _note_ranks(self) -> None:
        with contextlib.suppress(psutil.Error):
            if self.is_running:
                self._ranks = psutil.Process(self.pid).children(recursive=True)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[RankedDeployment]:
    folder = tmp_path_factory.mktemp("ranked")
    running = PodDeployment(folder, {BASE_MODEL: model_dir}, ("scheduler",))
    address = f"127.0.0.1:{free_port()}"
    torchrun = _Torchrun(
        "trainer",
        folder,
        running.settings_of("trainer", listen_address=address, shard_base=True, rank_timeout_s=20),
        launcher=TORCHRUN,
    )
    torchrun.variables["GLOO_SOCKET_IFNAME"] = "lo"
    running.processes["trainer"] = torchrun
    with running:
        yield RankedDeployment(running.address, running.api_key, model_dir, torchrun)


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
    before = len(ranked.torchrun.log.read_text())
    ranked.torchrun.terminate()
    ranked.torchrun.wait(30)
    assert not any(process.is_running() for process in processes)
    text = ranked.torchrun.log.read_text()[before:]
    assert "waiting for rank 0 to stop" in text
    assert '"event": "stopped"' in text
    assert "ranks lost" not in text
    assert "forcefully" not in text
