"""What a recipe calls, and whether it is there: trainers, samplers, environments, a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tinsmith.client import Client
from tinsmith.driver.methods import Method
from tinsmith.driver.waiting import missing_model, wait_for
from tinsmith.errors import FailedPreconditionError
from tinsmith.recipes import evaluate, match, rl_episodes, supervised


def wait_ready(
    policies: Mapping[Client, str],
    method: Method,
    *,
    timeout_s: float,
    say: Callable[[str], None],
) -> bool:
    """Return once everything is there that a recipe calls.

    Args:
        policies: The base model that each client trains or samples; a job without agents has one
            client.
        method: What the job is to do.
        timeout_s: How long to wait.
        say: Told what is waited for, when that changes.

    Returns:
        Whether every base model can be sampled from, which supervised training does without.

    Raises:
        UnavailableError: If something is still not there in the end.
    """

    def find_missing() -> str:
        found = (_missing(client, model, method) for client, model in policies.items())
        return next(filter(None, found), "")

    wait_for(find_missing, timeout_s=timeout_s, say=say)
    return not any(
        missing_model(client, model, is_sampled=True, is_trained=False)
        for client, model in policies.items()
    )


def _missing(client: Client, base_model: str, method: Method) -> str:
    """Return what of a policy is not there, in words."""
    is_sampled = method.recipe is not supervised
    is_trained = method.recipe is not evaluate
    missing = missing_model(client, base_model, is_sampled=is_sampled, is_trained=is_trained)
    if missing or not is_sampled:
        return missing
    try:
        if method.recipe is rl_episodes:
            client.episodes.list(queue=method.config.queue)
        elif method.recipe is match:
            client.matches.list()
        if getattr(method.config, "environment", ""):
            client.environments.list()
    except FailedPreconditionError as error:
        return f"the {error.message.removeprefix('the server has no ')}"
    return ""
