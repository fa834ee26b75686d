"""A short day of a deployment: RL, rollouts, episodes, a match, OpenAI and failing calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import tinsmith
from tests.fakes.episode_player import EpisodeEndpoint, agents
from tests.fakes.table_games import Nim
from tests.integration.servers import BASE_MODEL, Deployment, EmbeddedThread
from tinsmith.matches import MatchSpec, Member, play
from tinsmith.recipes import rl, rl_episodes
from tinsmith.rollouts import GroupConfig, RolloutConfig

_AGENTS = ("black", "white")


def live_one(server: EmbeddedThread, deployment: Deployment, output: Path) -> None:
    """Do everything once, on one client; training goes through several steps."""
    with deployment.client() as client:
        for name, environment in (("sums", ""), ("guessing", "guessing")):
            rl.main(
                rl.Config(
                    base_model=BASE_MODEL,
                    environment=environment,
                    loss="ppo",
                    num_steps=6,
                    num_problems=4,
                    group_size=4,
                    temperature=1.0,
                    num_validation=2,
                    save_every=3,
                    output_dir=output / name,
                ),
                client,
            )
        _episodes(server, client, output / "episodes")
        # The series of a run end with it, and a rate needs two scrapes: what fails comes early.
        _fail(client)
        _stream(client)
        _rollouts(client)
        _learn(client)
        asyncio.run(_match(client))
    _openai(deployment)
    with (
        contextlib.suppress(tinsmith.TinsmithError),
        deployment.client(api_key="tsk_000000000000_wrong") as stranger,
    ):
        stranger.runs.list()


def _episodes(server: EmbeddedThread, client: tinsmith.Client, output: Path) -> None:
    endpoint = EpisodeEndpoint(server.scheduler_address, server.pod_key)
    is_unlucky = iter([True])

    def work(episode: tinsmith.HeldEpisode) -> None:
        if next(is_unlucky, False):
            episode.abort("the tool broke")
            return
        tokens = endpoint.complete(episode.openai.api_key, [1, 2, 3], max_tokens=4)
        episode.end(tinsmith.WorkflowOutput(reward=float(np.mean(np.array(tokens) % 2))))

    config = rl_episodes.Config(
        base_model=BASE_MODEL,
        num_steps=2,
        num_tasks=2,
        group_size=4,
        num_validation=2,
        step_timeout_s=60,
        output_dir=output,
    )
    with (
        contextlib.closing(endpoint),
        agents(client, work, queue="rl", types=("train", "train", "eval")),
    ):
        rl_episodes.main(config, client)


def _stream(client: tinsmith.Client) -> None:
    run = client.create_lora_training_run(BASE_MODEL, rank=2)
    sampler = run.sampler()
    prompt = list(range(5, 90))
    for _ in range(3):
        params = tinsmith.SamplingParams(max_tokens=8)
        for _piece in sampler.stream(prompt, sampling_params=params):
            pass
    client.checkpoints.copy(run.save_state("kept").result().path, run, "copied")


def _rollouts(client: tinsmith.Client) -> None:
    """Let the server play."""
    sampler = client.create_sampler(base_model=BASE_MODEL)
    for key in ("one", "two"):
        client.rollouts.generate(
            "guessing",
            range(2),
            sampler=sampler,
            config=RolloutConfig(max_turns=3, max_tokens_per_turn=6),
            groups=GroupConfig(group_size=2),
            batch_key=key,
        ).result()


def _learn(client: tinsmith.Client) -> None:
    """Take steps of PPO whose ratios leave the bounds, and report what a loop reports."""
    run = client.create_lora_training_run(BASE_MODEL, rank=2)
    tokens = [6, 7, 8, 9]
    for step in range(4):
        scored = (
            run.forward([_datum(tokens, weights=[1.0] * 4)], "cross_entropy")
            .result()
            .outputs[0]
            .logprobs
        )
        shifted = [
            float(each) + (0.5 if number % 2 else -0.5) for number, each in enumerate(scored)
        ]
        data = [
            _datum(tokens, logprobs=shifted, advantages=[1.0, -1.0, 1.0, -1.0]),
            _datum(tokens, logprobs=[float(each) for each in scored], advantages=[0.0] * 4),
        ]
        run.forward_backward(data, "ppo")
        run.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()
        run.log_metrics({"response_tokens": 4.0, "truncated_fraction": 0.25}, step=step)


def _datum(tokens: Sequence[int], **inputs: Sequence[float]) -> tinsmith.Datum:
    prompt = tinsmith.ModelInput.from_ints([5, *tokens[:-1]])
    return tinsmith.Datum(prompt, {"target_tokens": list(tokens), **inputs})


def _fail(client: tinsmith.Client) -> None:
    run = client.create_lora_training_run(BASE_MODEL, rank=2)
    datum = tinsmith.Datum(
        tinsmith.ModelInput.from_ints([5, 6, 7]),
        {"target_tokens": [6, 7, 8], "weights": [3e38, 3e38, 3e38]},
    )
    for _ in range(3):
        with contextlib.suppress(tinsmith.TinsmithError):
            run.forward_backward([datum]).result()
    with contextlib.suppress(tinsmith.TinsmithError):
        client.runs.get("no-such-run")


async def _match(client: tinsmith.Client) -> None:
    match = await client.matches.create_async(MatchSpec(agents=_AGENTS, num_games=2, num_epochs=1))
    members = [await client.matches.join_async(match.name, agent) for agent in _AGENTS]

    async def game(member: Member, number: int) -> None:
        instance = await play(member, 0, number, Nim(_AGENTS))
        done = False
        while not done:
            done = (await instance.step_async("1")).done
        await instance.delete_async()

    async def run(member: Member) -> None:
        async with member:
            for epoch in member.epochs():
                async with epoch.rollout():
                    await asyncio.gather(*(game(member, number) for number in range(2)))
                async with epoch.update():
                    pass

    await asyncio.gather(*map(run, members))


def _openai(deployment: Deployment) -> None:
    body = json.dumps({"model": BASE_MODEL, "prompt": "1+1=", "max_tokens": 4}).encode()
    for key in (deployment.api_key, "tsk_000000000000_wrong"):
        request = urllib.request.Request(
            f"http://{deployment.address}/v1/completions",
            body,
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request) as answer:
            answer.read()
