"""CoordinatorService as a whole: rollouts and matches."""

from __future__ import annotations

from tinsmith_coordinator.matches.matches import Matches
from tinsmith_coordinator.matches.seats import Seats
from tinsmith_coordinator.rollouts.batches import RolloutBatches
from tinsmith_coordinator.rollouts.driver import RolloutDriver
from tinsmith_coordinator.rpc.match_servicer import MatchServicer
from tinsmith_coordinator.rpc.rollout_servicer import RolloutServicer


class CoordinatorServicer(RolloutServicer, MatchServicer):
    """Maps CoordinatorService onto the domain."""

    def __init__(
        self, matches: Matches, seats: Seats, batches: RolloutBatches, driver: RolloutDriver
    ) -> None:
        RolloutServicer.__init__(self, batches, driver)
        MatchServicer.__init__(self, matches, seats)
