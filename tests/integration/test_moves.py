"""Runs outlive their trainers: killed, drained or stopped ones are replaced, with the same bits."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator

import pytest
from tests.chaos.cluster import BASE_MODEL, Cluster
from tests.fakes.postgres import PostgresServer
from tests.integration.servers import weight_files
from tests.support.wait import until

import tinsmith
from tinsmith_local.tiny_model import build_tiny_model

NUM_STEPS = 12
IN_FLIGHT = 4


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    model = build_tiny_model(folder / "model")
    with Cluster(
        folder / "pods", model, database_url=postgres.create_database(), num_trainers=2
    ) as cluster:
        yield cluster


class Training:
    """A training whose steps are submitted ahead; what came of it is compared by hash."""

    def __init__(self, client: tinsmith.Client) -> None:
        self.run = client.create_lora_training_run(BASE_MODEL, rank=4, seed=3)
        self.results: list[str] = []
        self._waiting: list[tuple[object, object]] = []
        self.num_submitted = 0

    def submit(self, num_steps: int) -> None:
        for _ in range(num_steps):
            tokens = [(7 * self.num_submitted + offset) % 90 + 3 for offset in range(24)]
            datum = tinsmith.Datum(
                tinsmith.ModelInput.from_ints(tokens[:-1]),
                {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
            )
            gradient = self.run.forward_backward([datum])
            self._waiting.append(
                (gradient, self.run.optim_step(tinsmith.AdamParams(learning_rate=1e-2)))
            )
            self.num_submitted += 1

    def collect(self, *, leave: int = 0) -> None:
        while len(self._waiting) > leave:
            gradient, update = self._waiting.pop(0)
            digest = hashlib.sha256(gradient.result().outputs[0].logprobs.tobytes())
            digest.update(json.dumps(update.result().metrics, sort_keys=True).encode())
            self.results.append(digest.hexdigest())

    def bits(self) -> dict[str, str]:
        saved = self.run.save_state("end").result()
        files = weight_files(saved)
        return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


@pytest.fixture(scope="module")
def calm(cluster: Cluster) -> Training:
    """What an undisturbed training gives."""
    with cluster.client() as client:
        training = Training(client)
        training.submit(NUM_STEPS)
        training.collect()
        training.results.append(json.dumps(training.bits(), sort_keys=True))
    return training


def finish(training: Training, calm: Training) -> None:
    """Submit what is left and compare with the calm run."""
    training.submit(NUM_STEPS - training.num_submitted)
    training.collect()
    training.results.append(json.dumps(training.bits(), sort_keys=True))
    assert training.results == calm.results


def test_a_killed_trainer_is_replaced_by_another(cluster: Cluster, calm: Training) -> None:
    with cluster.client() as client:
        training = Training(client)
        holder = cluster.trainer_of(client, training.run.name)
        training.submit(8)
        training.collect(leave=5)
        holder.hold_down()
        try:
            finish(training, calm)
            assert cluster.trainer_of(client, training.run.name) is not holder
        finally:
            holder.start()


def test_a_trainer_that_is_restarted_gets_its_runs_back(cluster: Cluster, calm: Training) -> None:
    with cluster.client() as client:
        training = Training(client)
        holder = cluster.trainer_of(client, training.run.name)
        training.submit(8)
        training.collect(leave=5)
        for other in cluster.trainers:
            other.kill()
        finish(training, calm)
        assert holder.is_running


def test_a_drained_trainer_hands_its_runs_over(cluster: Cluster, calm: Training) -> None:
    with cluster.client() as client:
        training = Training(client)
        holder = cluster.trainer_of(client, training.run.name)
        training.submit(8)
        training.collect(leave=5)
        holder.stop()
        try:
            assert holder.exit_codes[-1] == 0
            finish(training, calm)
            assert cluster.trainer_of(client, training.run.name) is not holder
        finally:
            holder.start()


def test_a_zombie_commits_nothing_and_ends(cluster: Cluster, calm: Training) -> None:
    with cluster.client() as client:
        training = Training(client)
        holder = cluster.trainer_of(client, training.run.name)
        training.submit(8)
        training.collect(leave=5)
        num_exits = len(holder.exit_codes)
        holder.send(signal.SIGSTOP)
        finish(training, calm)
        assert cluster.trainer_of(client, training.run.name) is not holder
        holder.send(signal.SIGCONT)
        until(lambda: len(holder.exit_codes) > num_exits)
        assert holder.exit_codes[num_exits] == 3


def test_the_scheduler_may_die_while_trainers_train(cluster: Cluster, calm: Training) -> None:
    with cluster.client() as client:
        training = Training(client)
        training.submit(8)
        training.collect(leave=5)
        cluster.scheduler.kill()
        finish(training, calm)
