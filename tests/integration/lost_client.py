"""A client program that is killed: `python -m tests.integration.lost_client ADDRESS KEY STEPS`.

Trains two steps and says which session it has. Told to go on, it sends STEPS more, says when they
are accepted, and waits for ever.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

import tinsmith

BASE_MODEL = "tiny"
ADAM = tinsmith.AdamParams(learning_rate=1e-2)
NUM_FIRST_STEPS = 2


def make_datum(seed: int, num_tokens: int = 24) -> tinsmith.Datum:
    tokens = np.random.default_rng(seed).integers(3, 200, num_tokens + 1)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(num_tokens)}
    return tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)


def create_run(client: tinsmith.Client) -> tinsmith.TrainingRun:
    return client.create_lora_training_run(BASE_MODEL, rank=8, seed=3)


def submit_steps(
    run: tinsmith.TrainingRun, seeds: range
) -> list[tinsmith.OperationFuture[tinsmith.ForwardBackwardOutput | tinsmith.OptimStepResponse]]:
    futures = []
    for seed in seeds:
        futures.append(run.forward_backward([make_datum(seed)]))
        futures.append(run.optim_step(ADAM))
    return futures


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(address: str, api_key: str, num_steps: int) -> None:
    client = tinsmith.Client(address, api_key)
    run = create_run(client)
    for future in submit_steps(run, range(NUM_FIRST_STEPS)):
        future.result(timeout=60)
    say(client.session)
    sys.stdin.readline()
    futures = submit_steps(run, range(NUM_FIRST_STEPS, NUM_FIRST_STEPS + num_steps))
    pause = threading.Event()
    while any(future.metadata is None for future in futures):
        pause.wait(0.01)
    say("accepted")
    pause.wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
