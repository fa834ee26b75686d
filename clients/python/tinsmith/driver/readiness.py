"""Waiting for the pods of a job: its driver may be there before those that it calls.

For a client that names a model which is not served, that is an error at once. A driver knows that
the pods are on their way; how long they may take is the controller's to judge.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tinsmith.client import Client
from tinsmith.driver.methods import Method
from tinsmith.errors import FailedPreconditionError, UnavailableError
from tinsmith.recipes import rl_episodes, supervised

_POLL_S = 1.0


def wait_ready(
    client: Client, method: Method, *, timeout_s: float, say: Callable[[str], None]
) -> bool:
    """Return once everything is there that a recipe calls.

    Args:
        client: Calls with the key of the job.
        method: What the job is to do.
        timeout_s: How long to wait.
        say: Told what is waited for, when that changes.

    Returns:
        Whether the base model can be sampled from, which supervised training does without.

    Raises:
        UnavailableError: If something is still not there in the end.
    """
    deadline_s = time.monotonic() + timeout_s
    said = ""
    while True:
        missing, is_sampleable = _missing(client, method)
        if not missing:
            return is_sampleable
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"after {timeout_s:g} s {missing} is still not there")
        if missing != said:
            say(f"waits for {missing}")
            said = missing
        time.sleep(_POLL_S)


def _missing(client: Client, method: Method) -> tuple[str, bool]:
    """Return what is not there, in words, and whether the base model can be sampled from."""
    base_model = method.config.base_model
    served = {model.base_model: model for model in client.list_models()}
    model = served.get(base_model)
    is_sampleable = model is not None and model.sampleable
    if model is None or not model.trainable:
        return f"a trainer of the base model {base_model}", is_sampleable
    if method.recipe is supervised:
        return "", is_sampleable
    if not is_sampleable:
        return f"a sampler of the base model {base_model}", is_sampleable
    try:
        if method.recipe is rl_episodes:
            client.episodes.list(queue=method.config.queue)
        elif method.config.environment:
            client.environments.list()
    except FailedPreconditionError as error:
        return f"the {error.message.removeprefix('the server has no ')}", is_sampleable
    return "", is_sampleable
