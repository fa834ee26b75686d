"""The wire of the `tinker` SDK, 0.38, and of its cookbook: unmodified, only URL and key are set.

* `routes`: every endpoint; begin here.
* `retrieval`: the state and result of a future.
* `runs`: calls of a model as operations of its run.
* `sampling`: samples, which no other pod keeps.
* `account`: sessions, checkpoints, downloads, keys, traces.
* `promises`: futures, and what was used.
* `wire`: what clients send and take, with the ids in it; `wire.proto` has its binary forms.
"""

from __future__ import annotations

from tinsmith_gateway.tinker.routes import TinkerWire

__all__ = ["TinkerWire"]
