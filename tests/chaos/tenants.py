"""Tenants: projects of their own whose trainings can be repeated and compared bit by bit.

A tenant trains for as many rounds as the disturbance takes. The calm training afterwards takes as
many, and must have the same results, weights and moments.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

import tinsmith
from tests.chaos.cluster import BASE_MODEL, Cluster
from tests.chaos.report import Row
from tests.integration.servers import Deployment, create_key
from tests.support.wait import TIMEOUT_S
from tinsmith.rollouts import MASKED_VERSION, TokenSample, build_arrays

IN_FLIGHT = 6
ADAM = tinsmith.AdamParams(learning_rate=1e-2)
_STEPS_PER_SAVE = 20
_GROUP_SIZE = 4
MAX_ROUNDS = 100_000

Step = tuple[
    tinsmith.OperationFuture[tinsmith.ForwardBackwardOutput],
    tinsmith.OperationFuture[tinsmith.OptimStepResponse],
]
GoOn = Callable[[int], bool]
"""Whether a round of this number is to be made."""


@dataclass(slots=True)
class Training:
    """What a training left behind.

    Attributes:
        run: Its name.
        num_rounds: How long it trained, by the measure of its program.
        num_steps: Optimizer steps that the weights must contain.
        version: Optimizer steps that were applied, as the last one said.
        results: A hash of each result, in order.
        files: A hash of each file of weights and moments at the end.
    """

    run: str
    num_rounds: int = 0
    num_steps: int = 0
    version: int = 0
    results: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


Program = Callable[[tinsmith.Client, int, GoOn], Training]
"""What a tenant does: client, seed, how long."""


def supervised(client: tinsmith.Client, seed: int, goes_on: GoOn) -> Training:
    """Train with many steps in flight, and save now and then."""
    run = client.create_lora_training_run(BASE_MODEL, rank=8, seed=seed)
    training = Training(run.name)
    waiting: collections.deque[Step] = collections.deque()
    while goes_on(training.num_rounds):
        step = training.num_steps
        batch = [supervised_datum(seed, step, row) for row in range(4)]
        waiting.append((run.forward_backward(batch), run.optim_step(ADAM)))
        training.num_steps += 1
        training.num_rounds += 1
        if training.num_steps % _STEPS_PER_SAVE == 0:
            training.results.append(_hash_files(run.save_state(f"at-{training.num_steps}")))
        while len(waiting) > IN_FLIGHT:
            note_step(training, *waiting.popleft())
    while waiting:
        note_step(training, *waiting.popleft())
    return finish(training, run)


def reinforced(client: tinsmith.Client, seed: int, goes_on: GoOn) -> Training:
    """Train on samples of the live weights: each step depends on all bits before it."""
    run = client.create_lora_training_run(BASE_MODEL, rank=8, seed=seed)
    training = Training(run.name)
    sampler = run.sampler()
    while goes_on(training.num_rounds):
        note_reinforced_step(training, run, sampler, seed)
        training.num_rounds += 1
    return finish(training, run)


def note_reinforced_step(
    training: Training, run: tinsmith.TrainingRun, sampler: tinsmith.Sampler, seed: int
) -> None:
    """Sample a group, train on it, wait."""
    step = training.num_steps
    prompt = [(seed * 13 + step * 7 + offset) % 90 + 3 for offset in range(6)]
    params = tinsmith.SamplingParams(max_tokens=6, seed=seed * 100_000 + step, stop=[])
    drawn = sampler.sample(prompt, sampling_params=params, num_samples=_GROUP_SIZE).result()
    rewards = [float(sum(sequence.tokens) % 11) / 10 for sequence in drawn.sequences]
    mean = sum(rewards) / len(rewards)
    digest = hashlib.sha256()
    data = []
    for sequence, reward in zip(drawn.sequences, rewards, strict=True):
        digest.update(repr((sequence.tokens, sequence.logprobs, sequence.versions)).encode())
        data.append(_reinforced_datum(prompt, sequence, reward - mean))
    training.results.append(digest.hexdigest())
    gradient = run.forward_backward(data, "importance_sampling")
    note_step(training, gradient, run.optim_step(ADAM))
    training.num_steps += 1


def _reinforced_datum(
    prompt: Sequence[int], sequence: tinsmith.SampledSequence, advantage: float
) -> tinsmith.Datum:
    num_read, num_said = len(prompt), len(sequence.tokens)
    sample = TokenSample(
        tokens=np.asarray([*prompt, *sequence.tokens], dtype=np.int64),
        loss_mask=np.repeat([False, True], [num_read, num_said]),
        logprobs=np.asarray([0.0] * num_read + sequence.logprobs, dtype=np.float32),
        versions=np.asarray([MASKED_VERSION] * num_read + sequence.versions, dtype=np.int64),
        turn_indices=np.repeat([-1, 0], [num_read, num_said]),
    )
    return build_arrays(sample, advantage).to_datum()


def supervised_datum(seed: int, step: int, row: int = 0, *, num_tokens: int = 32) -> tinsmith.Datum:
    """Return a training sequence that only its arguments decide."""
    begin = seed * 31 + step * 7 + row * 17
    tokens = [(begin + offset * (1 + row % 3)) % 90 + 3 for offset in range(num_tokens + 1)]
    return tinsmith.Datum(
        tinsmith.ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [1.0] * num_tokens},
    )


def note_step(
    training: Training,
    gradient: tinsmith.OperationFuture[tinsmith.ForwardBackwardOutput],
    update: tinsmith.OperationFuture[tinsmith.OptimStepResponse],
) -> None:
    """Wait for a step and keep a hash of what it said."""
    result, step = gradient.result(), update.result()
    digest = hashlib.sha256(json.dumps(result.metrics, sort_keys=True).encode())
    for output in result.outputs:
        digest.update(output.logprobs.tobytes())
    digest.update(json.dumps(step.metrics, sort_keys=True).encode())
    training.results.append(f"{step.version}:{digest.hexdigest()}")
    training.version = step.version


def finish(training: Training, run: tinsmith.TrainingRun) -> Training:
    """Save the end of a training and keep the hashes of its files."""
    training.files = _hashes_of(run.save_state("end"))
    return training


def _hash_files(saved: tinsmith.OperationFuture[tinsmith.Checkpoint]) -> str:
    return hashlib.sha256(repr(sorted(_hashes_of(saved).items())).encode()).hexdigest()


def _hashes_of(saved: tinsmith.OperationFuture[tinsmith.Checkpoint]) -> dict[str, str]:
    """Return the SHA-256 of each file of weights and moments, wherever the files are."""
    return {
        file.file: file.sha256
        for file in saved.result().files
        if file.file.endswith(".safetensors")
    }


@dataclass(frozen=True, slots=True)
class Tenant:
    """A project and what it does."""

    project: str
    program: Program
    seed: int


class Tenants:
    """Runs tenants beside each other, each with a key and a client of its own.

    Args:
        cluster: Where.
        tenants: The tenants.
    """

    def __init__(self, cluster: Cluster, tenants: Sequence[Tenant]) -> None:
        self._tenants = tenants
        self._cluster = cluster
        operator = Deployment(cluster.address, cluster.api_key, cluster.folder)
        self._keys = {each.project: create_key(operator, each.project) for each in tenants}
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._trainings: dict[str, Training] = {}
        self._failures: list[BaseException] = []

    @property
    def is_broken(self) -> bool:
        """Whether a client was given an error, which `join` raises."""
        return bool(self._failures)

    def start(self, only: int | None = None) -> None:
        """Train until `join`: all tenants, or the one of this number."""
        self._is_over.clear()
        chosen = self._tenants if only is None else [self._tenants[only]]
        self._begin(chosen, lambda _, number: not self._is_over.is_set() and number < MAX_ROUNDS)

    def join(self) -> dict[str, Training]:
        """Have the trainings come to their end, and return them by project."""
        self._is_over.set()
        return self._end()

    def repeat(self, disturbed: dict[str, Training]) -> dict[str, Training]:
        """Train as many rounds again, undisturbed."""
        chosen = [tenant for tenant in self._tenants if tenant.project in disturbed]
        self._begin(chosen, lambda tenant, number: number < disturbed[tenant.project].num_rounds)
        return self._end()

    def client(self, tenant: Tenant) -> tinsmith.Client:
        """Return a client of a tenant."""
        return tinsmith.Client(
            self._cluster.address,
            self._keys[tenant.project],
            project=tenant.project,
            operation_timeout_s=TIMEOUT_S,
            retry=tinsmith.RetryPolicy(budget_s=TIMEOUT_S),
        )

    def _begin(self, chosen: Sequence[Tenant], goes_on: Callable[[Tenant, int], bool]) -> None:
        self._trainings = {}
        self._threads = [
            threading.Thread(
                target=self._run, args=(tenant, functools.partial(goes_on, tenant)), name="tenant"
            )
            for tenant in chosen
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, tenant: Tenant, goes_on: GoOn) -> None:
        try:
            with self.client(tenant) as client:
                self._trainings[tenant.project] = tenant.program(client, tenant.seed, goes_on)
        except BaseException as error:
            self._failures.append(error)

    def _end(self) -> dict[str, Training]:
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]
        return dict(self._trainings)


def compare(calm: dict[str, Training], disturbed: dict[str, Training]) -> list[Row]:
    """Return what differs between trainings of the same tenants, by project."""
    pairs = [(calm[project], disturbed[project]) for project in disturbed]
    num_steps = sum(after.num_steps for _, after in pairs)
    num_results = sum(len(after.results) for _, after in pairs)
    return [
        Row(
            name="optimizer steps applied more or less than once",
            value=sum(abs(after.num_steps - after.version) for _, after in pairs),
            target=0,
            note=f"of {num_steps}",
        ),
        Row(
            name="results that differ from the calm run",
            value=sum(
                abs(len(before.results) - len(after.results))
                + sum(a != b for a, b in zip(before.results, after.results, strict=False))
                for before, after in pairs
            ),
            target=0,
            note=f"of {num_results}",
        ),
        Row(
            name="files of weights and moments that differ",
            value=sum(len(before.files.items() ^ after.files.items()) for before, after in pairs),
            target=0,
            note=f"of {sum(len(after.files) for _, after in pairs)}",
        ),
    ]
