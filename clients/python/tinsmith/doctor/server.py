"""Checks of a server: whether it answers, takes the key, and can do what a training needs."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator

from tinsmith.client import Client
from tinsmith.doctor.findings import Finding, good, note, problem
from tinsmith.errors import (
    ConfigurationError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    TinsmithError,
    UnauthenticatedError,
    UnavailableError,
)

_SOON = datetime.timedelta(days=7)


def check_server(connect: Callable[[], Client]) -> Iterator[Finding]:
    """Look at the server that commands use.

    Args:
        connect: Opens a client.

    Yields:
        What was found; nothing more once the server cannot be reached.
    """
    try:
        client = connect()
    except ConfigurationError as error:
        yield problem("connection", error.message, error.remedy)
        return
    except UnauthenticatedError as error:
        yield problem(
            "key",
            f"the server refuses the key: {error.message}",
            "check TINSMITH_API_KEY; the server's operator makes keys with `tinsmith keys create`",
        )
        return
    except (NotFoundError, PermissionDeniedError) as error:
        yield problem("project", error.message, "unset TINSMITH_PROJECT: the key names its project")
        return
    except UnavailableError as error:
        yield problem(
            "connection",
            error.message,
            "check that it runs, the address, and whether it is https:// or not",
        )
        return
    except TinsmithError as error:
        yield problem("connection", error.message, error.remedy)
        return
    with client:
        yield good("connection", f"{client.address} answers, project {client.project}")
        for check in (_models, _runs, _environments, _keys):
            try:
                yield from check(client)
            except TinsmithError as error:
                yield problem(check.__name__.strip("_"), error.message, error.remedy)


def _models(client: Client) -> Iterator[Finding]:
    models = client.list_models()
    if not models:
        yield problem(
            "models",
            "no base model is served: no trainer or sampler is registered",
            "start one: tinsmith up, python -m tinsmith_trainer, or a TrainerPool",
        )
    for model in models:
        if not model.trainable:
            yield problem(
                "models", f"{model.base_model} has no trainer", "start a trainer that serves it"
            )
        if not model.sampleable:
            yield problem(
                "models", f"{model.base_model} has no sampler", "start a sampler that serves it"
            )
        if model.trainable and model.sampleable:
            yield good("models", f"{model.base_model} trains and samples, {model.exactness}")
        if model.exactness == "fast":
            yield note(
                "exactness",
                f"{model.base_model}: bits may depend on what shares a pass",
                "tinsmith up --exact true says why this machine cannot keep them",
            )


def _runs(client: Client) -> Iterator[Finding]:
    runs = [run for run in client.runs.list() if run.state == "active"]
    for run in runs:
        if run.replay_diverged:
            yield problem(
                "runs",
                f"a replay of {run.name} gave other bits than its first execution",
                "begin anew from a checkpoint before it: tinsmith runs show NAME lists them",
            )
        if run.waiting_for:
            yield note(
                "runs", f"{run.name} waits for {run.waiting_for}", "tinsmith runs list --watch"
            )
    yield good("runs", f"{len(runs)} runs are active")


def _environments(client: Client) -> Iterator[Finding]:
    try:
        found = client.environments.list()
    except FailedPreconditionError:
        yield note(
            "environments", "no environment service", "needed by `run rl environment=...` alone"
        )
    else:
        yield good("environments", f"{len(found)} environments are served")


def _keys(client: Client) -> Iterator[Finding]:
    """Look at the keys of the project, if the key in use may."""
    try:
        keys = client.keys.list()
    except PermissionDeniedError:
        return
    now = datetime.datetime.now(datetime.UTC)
    for key in keys:
        if key.state == "active" and key.expire_time and now < key.expire_time < now + _SOON:
            yield note(
                "keys",
                f"{key.name} ({key.display_name or 'no name'}) expires "
                f"{key.expire_time:%Y-%m-%d %H:%M} UTC",
                "tinsmith keys create makes another one",
            )
