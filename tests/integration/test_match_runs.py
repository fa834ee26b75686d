"""An agent whose run is gone, or another project's: it is told, and the other agent plays on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.integration.servers import Deployment, create_key

import tinsmith
from tinsmith.games import KuhnGame
from tinsmith.matches import MatchSpec, Member, play
from tinsmith.rollouts import RolloutConfig, RolloutRunner, SamplerFailedError, Trajectory
from tinsmith.rollouts.adapters import ServiceSampler

# White begins, so that black waits for it.
BOTH = ("white", "black")
CONFIG = RolloutConfig(max_turns=2, max_tokens_per_turn=2)


async def live(
    run: tinsmith.TrainingRun, runner: RolloutRunner, member: Member
) -> list[Trajectory]:
    """Play two epochs of one game; return what was played."""
    found = []
    async with member:
        for epoch in member.epochs():
            async with epoch.rollout():
                game = play(member, epoch.index, 0, KuhnGame.dealt(BOTH, epoch.index))
                found.append(await runner.run(lambda game=game: game))
            async with epoch.update():
                inputs = {"target_tokens": np.array([2, 3]), "weights": np.ones(2, np.float32)}
                datum = tinsmith.Datum(tinsmith.ModelInput.from_ints([1, 2]), inputs)
                await run.forward_backward_async([datum], "cross_entropy")
                await (await run.optim_step_async(tinsmith.AdamParams())).result_async()
    return found


async def test_a_run_that_was_deleted_is_told_its_agent_alone(embedded: Deployment) -> None:
    with embedded.client() as client:
        white, black = (client.create_lora_training_run("tiny", rank=4) for _ in BOTH)
        spec = MatchSpec(agents=BOTH, num_epochs=2, policy="drop", min_members=1)
        match = client.matches.create(spec)
        runs = [white, black]
        runners = [
            RolloutRunner(run.get_tokenizer(), ServiceSampler(run.sampler()), CONFIG)
            for run in runs
        ]
        members = [client.matches.join(match.name, agent) for agent in BOTH]
        client.runs.delete(white.name)
        gone, played = await asyncio.gather(
            *(live(*each) for each in zip(runs, runners, members, strict=True)),
            return_exceptions=True,
        )
        assert isinstance(gone, SamplerFailedError | tinsmith.NotFoundError)
        assert white.name in str(gone)
        assert not isinstance(played, BaseException)
        # No defeat: the first game was given up, and the second has one agent.
        assert played[0].reason.is_infrastructure
        assert "white gave it up" in played[0].failure
        ended = client.matches.get(match.name)
        assert (ended.state, ended.agents[0].state) == ("completed", "dropped")
        assert client.runs.get(black.name).version == 2


def test_a_run_and_a_match_of_another_project_are_as_if_there_were_none(
    embedded: Deployment,
) -> None:
    with embedded.client() as client:
        run = client.create_lora_training_run("tiny", rank=4)
        match = client.matches.create(MatchSpec(agents=BOTH))
    theirs = Deployment(embedded.address, create_key(embedded, "strangers"), embedded.model_dir)
    with theirs.client() as client:
        with pytest.raises(tinsmith.NotFoundError) as caught:
            client.runs.get(run.name)
        assert caught.value.reason == "RUN_NOT_FOUND"
        with pytest.raises(tinsmith.NotFoundError) as caught:
            client.matches.join(match.name, "white")
        assert caught.value.reason == "MATCH_NOT_FOUND"
