"""The service side: what a user of the SDK would write."""

from __future__ import annotations

import functools
import time

import numpy as np

import tinsmith
from bench import workload
from bench.processes import Server

ADAM = tinsmith.AdamParams(
    learning_rate=workload.LEARNING_RATE,
    beta1=workload.BETAS[0],
    beta2=workload.BETAS[1],
    eps=workload.EPS,
)

_REGISTRATION_TIMEOUT_S = 60.0

Batch = list[tinsmith.Datum]
Submitted = tuple[
    tinsmith.OperationFuture[tinsmith.ForwardBackwardOutput],
    tinsmith.OperationFuture[tinsmith.OptimStepResponse],
]


class ServiceSide:
    """A run on the server and the loops around it.

    Args:
        server: The server's process.
        run: The run.
    """

    def __init__(self, server: Server, run: tinsmith.TrainingRun) -> None:
        self.server = server
        self.run = run

    def cpu_time_s(self) -> float:
        """Return the CPU time used so far by the server and by this process, its client."""
        return self.server.cpu_time_s() + time.process_time()

    def train_ahead(self, data: list[Batch], num_steps: int) -> float:
        """Train with the next step submitted before the last one is awaited; return seconds."""
        begin_s = time.perf_counter()
        in_flight = self._submit(data[0])
        for step in range(1, num_steps):
            submitted = self._submit(data[step % len(data)])
            _finish(in_flight)
            in_flight = submitted
        _finish(in_flight)
        return time.perf_counter() - begin_s

    def train_awaited(self, data: list[Batch], num_steps: int) -> float:
        """Train with the results of each step awaited; return seconds."""
        begin_s = time.perf_counter()
        for step in range(num_steps):
            self.step(data[step % len(data)])
        return time.perf_counter() - begin_s

    def _submit(self, data: Batch) -> Submitted:
        return self.run.forward_backward(data, "cross_entropy"), self.run.optim_step(ADAM)

    def step(self, data: Batch) -> float:
        """Take one step, submitted as a whole; return the loss once both results are there."""
        return _finish(self._submit(data))

    def sample(self) -> list[tinsmith.SampleResponse]:
        """Sample all prompts with the live weights, as one request each, all at once."""
        sampler = self.run.sampler()
        params = tinsmith.SamplingParams(max_tokens=workload.SAMPLED_TOKENS, stop=[])
        futures = [
            sampler.sample(prompt.tolist(), sampling_params=params)
            for prompt in workload.make_prompts()
        ]
        results = [future.result() for future in futures]
        if any(len(r.sequences[0].tokens) != workload.SAMPLED_TOKENS for r in results):
            raise RuntimeError("a completion ended early")
        return results


def wait_served(client: tinsmith.Client) -> None:
    """Wait until trainer and sampler have registered, which they do after the server listens."""
    deadline_s = time.monotonic() + _REGISTRATION_TIMEOUT_S
    while not any(m.trainable and m.sampleable for m in client.list_models()):
        if time.monotonic() > deadline_s:
            raise RuntimeError("trainer and sampler did not register")
        time.sleep(0.05)


def _finish(submitted: Submitted) -> float:
    gradient, update = submitted
    loss = gradient.result().loss
    update.result()
    return loss


@functools.cache
def make_data(num_sequences: int, num_tokens: int) -> list[Batch]:
    """Return the batches of a shape as the SDK takes them."""
    weights = np.ones(num_tokens, dtype=np.float32)
    return [
        [
            tinsmith.Datum(
                tinsmith.ModelInput.from_ints(tokens_T[:-1]),
                {"target_tokens": tokens_T[1:], "weights": weights},
            )
            for tokens_T in batch
        ]
        for batch in workload.make_batches(num_sequences, num_tokens)
    ]
