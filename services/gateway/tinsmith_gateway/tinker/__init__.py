"""The wire of the `tinker` SDK, 0.38, and of its cookbook: unmodified, only URL and key are set.

* `bodies`, `wire.proto`: what clients send and take.
* `ids`, `futures`: their identifiers, and the resource names behind them.
* `numbered_calls`, `training`: calls of a model as operations of its run.
* `sample_futures`, `sample_routes`: samples, which no other pod keeps.
* `retrieval`: the state and result of a future.
* `sessions`, `checkpoints`, `downloads`, `account`, `perfetto_trace`: everything else.
"""

from __future__ import annotations

from tinsmith_gateway.tinker.routes import TinkerWire

__all__ = ["TinkerWire"]
