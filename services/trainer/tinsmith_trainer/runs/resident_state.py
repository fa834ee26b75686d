"""What a trainer knows of the state of a run in its engine: whether it is there and how new it is.

Residency, the replay and the commits tell this record what they did to the state, by one method
each. The numbers decide what a restore replays, when a snapshot is due and which run is parked.
"""

from __future__ import annotations


class ResidentState:
    """The state of one run in its engine; changed under the lock of the run.

    Attributes:
        is_resident: Whether the engine holds the run.
        was_computed: Whether it was computed since it came into the engine.
        sequence_number: The last operation that the state contains.
        replay_cost_s: How long it would take to compute what no snapshot contains.
        last_used: Order of use, to find the run that idled longest.
        weights_serial: Raised whenever the weights may have changed.
        is_being_saved: Whether a snapshot is being written.
    """

    def __init__(self) -> None:
        self.is_resident = False
        self.was_computed = False
        self.sequence_number = 0
        self.replay_cost_s = 0.0
        self.last_used = 0
        self.weights_serial = 0
        self.is_being_saved = False

    def start_restore(self, sequence_number: int = 0) -> None:
        """Begin with a state that contains this operation and none after it; 0 is the seed."""
        self.sequence_number = sequence_number
        self.replay_cost_s = 0.0

    def replay(self, sequence_number: int) -> None:
        """Note that the state contains one more operation of the ledger."""
        self.sequence_number = sequence_number

    def enter(self) -> None:
        """Note that the restored state is in the engine."""
        self.is_resident = True
        self.was_computed = False
        self.weights_serial += 1

    def leave(self) -> bool:
        """Note that the engine drops the state; return whether it held one."""
        was_resident, self.is_resident = self.is_resident, False
        return was_resident

    def use(self, order: int) -> None:
        """Note that the state is used now."""
        self.last_used = order

    def compute(self) -> None:
        """Note that operations are computed on the state: from now on it may be parked."""
        self.was_computed = True

    def commit(
        self, sequence_number: int, *, duration_s: float = 0.0, is_step: bool = False
    ) -> None:
        """Note that results up to a number, which the state contains, are durable."""
        self.sequence_number = sequence_number
        self.replay_cost_s += duration_s
        self.weights_serial += is_step

    def load(self, sequence_number: int) -> None:
        """Note that a checkpoint was loaded, and that the load has a snapshot of its own."""
        self.sequence_number = sequence_number
        self.replay_cost_s = 0.0
        self.weights_serial += 1

    def add_replay_cost(self, duration_s: float) -> None:
        """Note that so much more would have to be computed again."""
        self.replay_cost_s += duration_s

    def take_replay_cost(self) -> float:
        """Return the cost of a replay for a snapshot that is begun, and count from 0 again."""
        cost_s, self.replay_cost_s = self.replay_cost_s, 0.0
        return cost_s

    def begin_save(self) -> None:
        """Note that a snapshot is being written, so that no second one is begun."""
        self.is_being_saved = True

    def end_save(self) -> None:
        """Note that the snapshot was written, or given up."""
        self.is_being_saved = False
