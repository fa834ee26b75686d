"""An agent plays an episode with the unmodified `openai` package; a loop gets the exact tokens."""

from __future__ import annotations

from typing import Any

import grpc
import openai
import pytest
from tests.integration.servers import BASE_MODEL, TIMEOUT_S, Deployment, bearer, new_request_id

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import episode_pb2, episode_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

PROJECT = "projects/default"
MODEL = "policy"
QUESTION: Any = {"role": "user", "content": "Repeat: tin"}


def test_the_calls_of_an_episode_are_one_trajectory_of_exact_tokens(embedded: Deployment) -> None:
    metadata = bearer(embedded.api_key)
    with grpc.insecure_channel(embedded.address) as channel:
        scheduler: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        episodes: Any = episode_pb2_grpc.EpisodeServiceStub(channel)

        def call(method: Any, request: Any) -> Any:
            return method(request, metadata=metadata, timeout=TIMEOUT_S)

        session = call(
            scheduler.CreateSession,
            scheduler_pb2.CreateSessionRequest(parent=PROJECT, request_id=new_request_id()),
        )
        handle = call(
            scheduler.CreateSamplingSession,
            scheduler_pb2.CreateSamplingSessionRequest(
                parent=session.name, request_id=new_request_id(), base_model=BASE_MODEL
            ),
        )
        call(
            episodes.CreateEpisodes,
            episode_pb2.CreateEpisodesRequest(
                parent=PROJECT,
                request_id=new_request_id(),
                episodes=[
                    episode_pb2.Episode(
                        queue="openai", sampling_session=handle.name, model=MODEL, task_id="t"
                    )
                ],
            ),
        )
        claim = call(
            episodes.ClaimEpisode,
            episode_pb2.ClaimEpisodeRequest(
                parent=PROJECT, request_id=new_request_id(), client_id="agent", queue="openai"
            ),
        )
        calls = play(embedded, claim.api_key)
        call(
            episodes.SubmitEpisode,
            episode_pb2.SubmitEpisodeRequest(
                name=claim.episode.name,
                lease_token=claim.lease_token,
                outcome=episode_pb2.EpisodeOutcome(reward=1.0),
            ),
        )
        played = call(
            episodes.GetEpisode,
            episode_pb2.GetEpisodeRequest(name=claim.episode.name, include_trajectories=True),
        )
    sampled = []
    for trajectory in played.trajectories:
        tokens = decode_tensor(trajectory.tokens)
        mask = decode_tensor(trajectory.mask).astype(bool)
        sampled += tokens[mask].tolist()
    assert sampled == [token for _, tokens in calls for token in tokens]
    first = played.trajectories[0]
    assert decode_tensor(first.prompt.chunks[0].tokens).tolist() == calls[0][0]
    assert sum(len(one.call_indices) for one in played.trajectories) == len(calls)
    # The key is good for the episode alone.
    with (
        client_of(embedded, claim.api_key) as agent,
        pytest.raises(openai.BadRequestError) as refused,
    ):
        agent.chat.completions.create(model=MODEL, messages=[QUESTION])
    assert refused.value.code == "episode_ended"


def client_of(deployment: Deployment, key: str) -> openai.OpenAI:
    """Return a client of a deployment."""
    return openai.OpenAI(
        base_url=f"http://{deployment.address}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S
    )


def play(deployment: Deployment, key: str) -> list[tuple[list[int], list[int]]]:
    """Say two things, one whole and one streamed; return prompt and tokens of each."""
    extra = {"return_token_ids": True}
    calls = []
    with client_of(deployment, key) as agent:
        whole: Any = agent.chat.completions.create(
            model=MODEL, messages=[QUESTION], max_tokens=6, extra_body=extra
        )
        calls.append((whole.prompt_token_ids, whole.choices[0].token_ids))
        stream: Any = agent.chat.completions.create(
            model=MODEL, messages=[QUESTION, QUESTION], max_tokens=6, stream=True, extra_body=extra
        )
        choices = [choice for chunk in stream for choice in chunk.choices]
        tokens = [token for one in choices for token in getattr(one, "token_ids", [])]
        calls.append((choices[0].prompt_token_ids, tokens))
    return calls
