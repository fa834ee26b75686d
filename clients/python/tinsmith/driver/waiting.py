"""Waiting for the pods of a job: its driver may be there before those that it calls.

For a client that names a model which is not served, that is an error at once. A driver knows that
the pods are on their way; how long they may take is the controller's to judge.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tinsmith.errors import UnavailableError

if TYPE_CHECKING:
    from tinsmith.client import Client

_POLL_S = 1.0


def wait_for(
    find_missing: Callable[[], str], *, timeout_s: float, say: Callable[[str], None]
) -> None:
    """Return once nothing is missing.

    Args:
        find_missing: Returns what is missing, in words; empty if everything is there.
        timeout_s: How long to wait.
        say: Told what is waited for, when that changes.

    Raises:
        UnavailableError: If something is still not there in the end.
    """
    deadline_s = time.monotonic() + timeout_s
    said = ""
    while True:
        missing = find_missing()
        if not missing:
            return
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"after {timeout_s:g} s {missing} is still not there")
        if missing != said:
            say(f"waits for {missing}")
            said = missing
        time.sleep(_POLL_S)


def missing_model(
    client: Client, base_model: str, *, is_sampled: bool, is_trained: bool = True
) -> str:
    """Return which pod of a base model is missing, in words; empty if none is.

    Args:
        client: Reaches the pods.
        base_model: What is trained, or sampled from.
        is_sampled: Whether it is sampled from.
        is_trained: Whether it is trained.
    """
    model = next((each for each in client.list_models() if each.base_model == base_model), None)
    if is_trained and (model is None or not model.trainable):
        return f"a trainer of the base model {base_model}"
    if is_sampled and (model is None or not model.sampleable):
        return f"a sampler of the base model {base_model}"
    return ""
