"""Figure 4 of the paper of OpenTinker: two agents, fixed turns, two rollout and update phases.

An agent is RUNNING where it may act and PENDING where it waits. Global barriers stand between the
phases, and the turn order is the barrier inside a rollout phase.
"""

from __future__ import annotations

from pathlib import Path

from tests.fakes.coordinator_harness import running_coordinator
from tests.fakes.match_player import POINTS, begin, create_match, get_match

from tinsmith.v1 import coordinator_pb2

Agent = coordinator_pb2.Agent
R, P = Agent.STATE_RUNNING, Agent.STATE_PENDING
START, ROLLOUT_END, UPDATE_START, UPDATE_END = POINTS


async def test_the_order_of_running_and_pending_is_that_of_figure_4(tmp_path: Path) -> None:
    async with running_coordinator(tmp_path) as rig:
        match = await create_match(rig, "agent-1", "agent-2", num_epochs=2)
        seen: list[tuple[int, ...]] = []

        async def look() -> None:
            seen.append(tuple(agent.state for agent in (await get_match(rig, match.name)).agents))

        first, second = await begin(rig, match)
        for epoch in range(2):
            if epoch:
                await first.arrive(START, epoch=epoch)
                await look()
                await second.arrive(START, epoch=epoch)
            await look()
            await first.move(turn=0, epoch=epoch)
            await look()
            await second.move(turn=1, epoch=epoch)
            await look()
            await first.move(turn=2, epoch=epoch, rewards={"agent-1": 1, "agent-2": -1})
            await look()
            for point in (ROLLOUT_END, UPDATE_START):
                await first.arrive(point, epoch=epoch)
                await look()
                await second.arrive(point, epoch=epoch)
                await look()
            # The second agent is done with its update first.
            await second.arrive(UPDATE_END, epoch=epoch)
            await look()
            await first.arrive(UPDATE_END, epoch=epoch)

        turns = [(R, P), (P, R), (R, P), (R, R)]
        barriers = [(P, R), (R, R), (P, R), (R, R)]
        update = [(R, P)]
        phase = [*turns, *barriers, *update]
        assert seen == [*phase, (P, R), *phase]
        assert (await get_match(rig, match.name)).state == coordinator_pb2.Match.STATE_COMPLETED
