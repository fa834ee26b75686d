"""A training that does everything a tenant can do, again and again: every failpoint is passed."""

from __future__ import annotations

import tinsmith
from tests.chaos.cluster import BASE_MODEL
from tests.chaos.tenants import (
    ADAM,
    GoOn,
    Step,
    Training,
    finish,
    note_reinforced_step,
    note_step,
    supervised_datum,
)

_STEPS_AHEAD = 4
# Over 64 KiB, from which on a request is stored beside the ledger.
_LARGE_NUM_ROWS = 48
_LARGE_NUM_TOKENS = 120


def tour(client: tinsmith.Client, seed: int, goes_on: GoOn) -> Training:
    """Train ahead, save, train on samples, load, create and delete another run; and again."""
    run = client.create_lora_training_run(BASE_MODEL, rank=4, seed=seed)
    sampler = run.sampler()
    training = Training(run.name)
    while goes_on(training.num_rounds):
        number = training.num_rounds
        for gradient, update in [_submit(run, training, seed) for _ in range(_STEPS_AHEAD)]:
            note_step(training, gradient, update)
        saved = run.save_state(f"round-{number}")
        note_reinforced_step(training, run, sampler, seed)
        saved.result()
        if number % 2:
            loaded = run.load_state_with_optimizer(f"round-{number}").result()
            # The step that came after the save is undone.
            training.num_steps -= 1
            training.version = loaded.version
        training.results.append(_visit_other_run(client, seed + number))
        training.num_rounds += 1
    return finish(training, run)


def _submit(run: tinsmith.TrainingRun, training: Training, seed: int) -> Step:
    step = run.forward_backward([supervised_datum(seed, training.num_steps)]), run.optim_step(ADAM)
    training.num_steps += 1
    return step


def _visit_other_run(client: tinsmith.Client, seed: int) -> str:
    """Make one large step on a run of its own, delete the run, and return what the step said."""
    run = client.create_lora_training_run(BASE_MODEL, rank=4, seed=seed)
    data = [
        supervised_datum(seed, 0, row, num_tokens=_LARGE_NUM_TOKENS)
        for row in range(_LARGE_NUM_ROWS)
    ]
    visit = Training(run.name)
    note_step(visit, run.forward_backward(data), run.optim_step(ADAM))
    client.runs.delete(run.name)
    return visit.results[0]
