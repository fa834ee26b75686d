"""Opening a sampling session on one source of weights."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from tinsmith.errors import ConfigurationError
from tinsmith.rpc.core import ClientCore
from tinsmith.sampling.sampler_endpoint import SamplerEndpoint
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.settings import RetryPolicy
from tinsmith.v1 import scheduler_pb2


async def open_sampler(
    core: ClientCore,
    *,
    base_model: str = "",
    checkpoint: str = "",
    run: str = "",
    min_version: Callable[[], int] = lambda: 0,
    retry_config: RetryPolicy | None = None,
    max_staleness: int = 0,
) -> Sampler:
    """Open a sampling session. Runs in the background loop.

    Args:
        core: What the client shares.
        base_model: Name of a base model.
        checkpoint: Resource name of a checkpoint.
        run: Resource name or id of a run, for its live weights.
        min_version: The version that each request must see at least.
        retry_config: How its requests are sent again; as the client's calls if None.
        max_staleness: Steps that the weights of a run may be older than `min_version`, while newer
            ones cannot be had.

    Returns:
        The sampler.

    Raises:
        ConfigurationError: Unless exactly one source is given, if `retry_config` is of another
            type, or if `max_staleness` is negative or not of a run.
    """
    if not isinstance(retry_config, RetryPolicy | None):
        raise ConfigurationError(
            f"retry_config is a {type(retry_config).__name__}",
            remedy="give tinsmith.RetryPolicy(budget_s=..., initial_backoff_s=..., "
            "max_backoff_s=...)",
        )
    if sum(map(bool, (base_model, checkpoint, run))) != 1:
        raise ConfigurationError(
            "a sampler needs one source", remedy="give base_model=, checkpoint= or run="
        )
    if max_staleness < 0 or (max_staleness and not run):
        raise ConfigurationError(
            f"max_staleness is {max_staleness}",
            remedy="give a number of steps, 0 or more, with run=; other weights do not change",
        )
    request = scheduler_pb2.CreateSamplingSessionRequest(
        parent=core.session.name, request_id=str(uuid.uuid4())
    )
    if base_model:
        request.base_model = base_model
    elif checkpoint:
        request.checkpoint = checkpoint
    else:
        request.run = core.run_name(run)
    message = await core.transport.call(
        core.scheduler, lambda c: c.scheduler.CreateSamplingSession, request
    )
    return _sampler_of(
        core,
        message,
        min_version=min_version,
        retry_config=retry_config,
        max_staleness=max_staleness,
    )


async def attach_sampler(
    core: ClientCore, sampling_session: str, *, min_version: int = 0, max_staleness: int = 0
) -> Sampler:
    """Return a sampler of a sampling session that is open. Runs in the background loop.

    Args:
        core: What the client shares.
        sampling_session: Resource name of the session.
        min_version: The version that each request must see at least.
        max_staleness: Steps that the weights of a run may be older.

    Raises:
        NotFoundError: If there is no such session.
    """
    message = await core.transport.call(
        core.scheduler,
        lambda c: c.scheduler.GetSamplingSession,
        scheduler_pb2.GetSamplingSessionRequest(name=sampling_session),
    )
    return _sampler_of(core, message, min_version=lambda: min_version, max_staleness=max_staleness)


def _sampler_of(
    core: ClientCore,
    message: scheduler_pb2.SamplingSession,
    *,
    min_version: Callable[[], int],
    retry_config: RetryPolicy | None = None,
    max_staleness: int,
) -> Sampler:
    async def locate() -> scheduler_pb2.SamplingSession:
        return await core.transport.call_once(
            core.scheduler,
            lambda c: c.scheduler.GetSamplingSession,
            scheduler_pb2.GetSamplingSessionRequest(name=message.name),
            timeout_s=10,
        )

    endpoint = SamplerEndpoint(message, core.settings.address, locate)
    return Sampler(core, message, endpoint, min_version, retry_config, max_staleness)
