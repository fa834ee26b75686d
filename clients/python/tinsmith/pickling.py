"""Handles that go to other processes: a client, a run or a sampler is pickled as what it names.

A handle that arrives in another process is opened there anew, on one client for each server and
project, under the key of that process. Futures do not travel: their result arrives where the call
was made.

A spawned process needs no session of its own to sample: it opens one with its first handle, and
finishes it when it ends.
"""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from tinsmith.client import Client, ServiceClient
from tinsmith.rpc.futures import OperationFuture, ResultFuture
from tinsmith.sampling.sampler_calls import SamplerSource
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.settings import Origin
from tinsmith.training.run_forms import TrainingRun

_clients: dict[Origin, Client] = {}
_lock = threading.Lock()


def connect_to(origin: Origin) -> Client:
    """Return the client of this process for a server and project, opening it at first.

    Raises:
        ConfigurationError: If this process has no key for the server.
        TinsmithError: If the server cannot be reached or refuses the key.
    """
    with _lock:
        client = _clients.get(origin)
        if client is None or client.is_closed:
            client = _clients[origin] = Client(
                origin.address,
                project=origin.project,
                ca_file=origin.ca_file,
                display_name="handles of another process",
            )
        return client


def reopen_run(origin: Origin, name: str) -> TrainingRun:
    """Continue a run in this process.

    Raises:
        NotFoundError: If the run was deleted.
    """
    return connect_to(origin).runs.get(name)


def reopen_sampler(source: SamplerSource) -> Sampler:
    """Open a sampler of the same weights in this process.

    Raises:
        NotFoundError: If the run or the checkpoint was deleted.
    """
    return connect_to(source.origin).reopen_sampler(source)


def register() -> None:
    """Tell `pickle` and `copy` how handles travel."""
    for kind in (Client, ServiceClient):
        copyreg.pickle(kind, _reduce_client)
    copyreg.pickle(TrainingRun, _reduce_run)
    copyreg.pickle(Sampler, _reduce_sampler)
    for future in (ResultFuture, OperationFuture):
        copyreg.pickle(future, _refuse)


Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def _reduce_client(client: Client) -> Reduced:
    return connect_to, (client.origin,)


def _reduce_run(run: TrainingRun) -> Reduced:
    return reopen_run, (run.origin, run.name)


def _reduce_sampler(sampler: Sampler) -> Reduced:
    return reopen_sampler, (sampler.source,)


def _refuse(future: ResultFuture[Any]) -> NoReturn:
    raise TypeError(
        f"{future!r} cannot be pickled: its result arrives in the process that made the call; "
        "pass the result, or the run and the sequence number of the operation"
    )
