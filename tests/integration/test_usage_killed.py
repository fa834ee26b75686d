"""Usage when pods are killed: every result of the ledger counts once."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.integration.servers import BASE_MODEL, pods
from tests.integration.test_usage import datum, only
from tests.support.pods import PodProcess
from tests.support.wait import until

import tinsmith

_NUM_STEPS = 8
_TOKENS_OF_STEP = 24


def test_kills_lose_no_training_and_count_nothing_twice(tmp_path: Path, model_dir: Path) -> None:
    with pods(tmp_path, model_dir) as (deployment, processes), deployment.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4, seed=1)
        done: list[int] = []
        killing = threading.Thread(target=_kill_by_turns, args=(processes, done))
        killing.start()
        for seed in range(_NUM_STEPS):
            run.forward_backward([datum(seed)], "cross_entropy")
            run.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()
            done.append(seed)
        killing.join()
        until(lambda: _trained(client) == _NUM_STEPS * _TOKENS_OF_STEP)
        engine_s = only(client.usage.list()).engine_seconds

        # A new process reports what it finds; what is there already changes nothing.
        processes["trainer"].kill()
        processes["trainer"].start()
        run.forward_backward([datum(0)], "cross_entropy").result()
        wanted = (_NUM_STEPS + 1) * _TOKENS_OF_STEP
        until(lambda: _trained(client) == wanted)
        assert only(client.usage.list()).engine_seconds >= engine_s


def _trained(client: tinsmith.Client) -> int:
    return only(client.usage.list()).num_trained_tokens


def _kill_by_turns(processes: dict[str, PodProcess], done: list[int]) -> None:
    """Kill the trainer and the scheduler, each after a few steps more."""
    for pod in ("trainer", "scheduler"):
        num_before = len(done)
        until(lambda num=num_before: len(done) >= num + 2)  # type: ignore[misc]
        processes[pod].kill()
        processes[pod].start()
