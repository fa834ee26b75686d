"""What tests of the real `tinker` package share: a connected client, and tokens to train on."""

from __future__ import annotations

import contextlib
import gc
import os
import urllib.request
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tests.integration.servers import Deployment
from tinker import types

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
PROMPT = types.ModelInput.from_ints(TOKENS[:4])
GREEDY = types.SamplingParams(max_tokens=5, temperature=0.0)


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Collect the connections that the SDK leaves open, in every file that imports this."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def url_of(deployment: Deployment) -> str:
    """Return what a user sets as `TINKER_BASE_URL`."""
    return f"http://{deployment.address}"


def key_of(deployment: Deployment) -> str:
    """Return what a user sets as `TINKER_API_KEY`."""
    return deployment.api_key.replace("tsk_", "tml-", 1)


@contextlib.contextmanager
def connected(deployment: Deployment, **options: object) -> Iterator[tinker.ServiceClient]:
    """Yield a client that was told URL and key, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TINKER_")]:
            patch.delenv(name)
        patch.setenv("TINKER_BASE_URL", url_of(deployment))
        patch.setenv("TINKER_API_KEY", key_of(deployment))
        with tinker.ServiceClient(**options) as client:
            yield client


def supervised(tokens: list[int], weight: float = 1.0) -> types.Datum:
    """Return a datum that teaches a sequence."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:]),
            "weights": np.full(len(tokens) - 1, weight, dtype=np.float32),
        },
    )


def train(model: tinker.TrainingClient, num_steps: int, learning_rate: float = 1e-2) -> list[float]:
    """Teach the tokens, both calls of a step on their way at once; return the losses."""
    losses = []
    for _ in range(num_steps):
        gradient = model.forward_backward([supervised(TOKENS)] * 2, "cross_entropy")
        update = model.optim_step(types.AdamParams(learning_rate=learning_rate))
        losses.append(gradient.result().metrics["loss:sum"])
        update.result()
    return losses


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        content: bytes = answer.read()
    return content
