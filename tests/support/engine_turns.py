"""Batches on one engine in several calls at a time, whose passes take turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tinsmith_engine import BatchRequest, BatchResult, Engine
from tinsmith_runtime.errors import TinsmithError


def computed_in_turns(
    random: np.random.Generator, engine: Engine, requests: Sequence[BatchRequest]
) -> list[BatchResult | TinsmithError]:
    """Compute requests in up to three calls, whose passes take turns in a random order.

    Requests of one run are in one call.
    """
    calls = {request.run: int(random.integers(3)) for request in requests}
    places = [
        [index for index, request in enumerate(requests) if calls[request.run] == call]
        for call in set(calls.values())
    ]
    going = [(engine.compute_by_pass([requests[i] for i in one]), one) for one in places]
    found: dict[int, BatchResult | TinsmithError] = {}
    while going:
        turn = int(random.integers(len(going)))
        passes, indices = going[turn]
        try:
            next(passes)
        except StopIteration as end:
            found.update(zip(indices, end.value, strict=True))
            del going[turn]
    return [found[index] for index in range(len(requests))]
