"""States of parked runs in host memory: the step between the engine's rows and files.

A run that idles gives its slot to another one. Its state is on disk by then. Reading it back and
computing what came after the snapshot takes longer than a copy from memory. So as many states as a
budget allows stay there. The one parked longest ago goes first. A state here is a copy of what the
ledger and the snapshots already hold: losing it costs time and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tinsmith_engine import RunState
from tinsmith_trainer.runs.accumulation import Accumulation


@dataclass(frozen=True, slots=True)
class ParkedState:
    """A run as it left the engine.

    Attributes:
        state: Its numbers.
        sequence_number: The last operation that they contain.
        accumulation: What became of the parts of the gradient, up to that operation.
    """

    state: RunState
    sequence_number: int
    accumulation: Accumulation

    @property
    def size_bytes(self) -> int:
        """What it takes of the budget."""
        return sum(tensor.nbytes for tensor in self.state.tensors.values())


class ParkedStates:
    """States by run, within a budget.

    Args:
        max_bytes: The budget; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._states: OrderedDict[str, ParkedState] = OrderedDict()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """What all states take."""
        return self._size_bytes

    def put(self, run: str, parked: ParkedState) -> None:
        """Keep a state, and give up those parked longest ago until all fit."""
        self.drop(run)
        if parked.size_bytes > self._max_bytes:
            return
        self._states[run] = parked
        self._size_bytes += parked.size_bytes
        while self._size_bytes > self._max_bytes:
            self.drop(next(iter(self._states)))

    def take(self, run: str) -> ParkedState | None:
        """Return the state of a run and forget it."""
        parked = self._states.get(run)
        self.drop(run)
        return parked

    def drop(self, run: str) -> None:
        """Forget the state of a run; none is no error."""
        parked = self._states.pop(run, None)
        if parked is not None:
            self._size_bytes -= parked.size_bytes
