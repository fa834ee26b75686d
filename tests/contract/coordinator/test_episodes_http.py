"""Episodes over HTTP, in the words of AgentJet's clients, both old and new."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.integration.servers import Deployment, embedded_server
from tests.support.metrics import metric

import tinsmith


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Deployment]:
    with embedded_server(tmp_path_factory.mktemp("episodes"), tiny_model) as running:
        yield running


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[tinsmith.Client]:
    with deployment.client() as connected:
        yield connected


class Agent:
    """Posts JSON, as AgentJet's client does."""

    def __init__(self, deployment: Deployment) -> None:
        self._http = httpx.Client(
            base_url=f"http://{deployment.address}",
            headers={"X-API-Key": deployment.api_key},
            timeout=30,
        )
        self.uuid = str(uuid.uuid4())
        self.queue = f"q-{uuid.uuid4().hex[:8]}"

    def ask(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        answer = self._http.post(path, json={"client_uuid": self.uuid, **body})
        return answer.status_code, answer.json()

    def get(self, path: str) -> dict[str, Any]:
        content: dict[str, Any] = self._http.get(path, params={"queue": self.queue}).json()
        return content

    def claim(self, **body: Any) -> dict[str, Any]:
        status, claimed = self.ask("/claim_episode", queue=self.queue, **body)
        assert status == 200
        return claimed

    def close(self) -> None:
        self._http.close()


@pytest.fixture
def agent(deployment: Deployment) -> Iterator[Agent]:
    made = Agent(deployment)
    yield made
    made.close()


@pytest.fixture
def registered(client: tinsmith.Client, agent: Agent) -> list[str]:
    """Two episodes on the base model."""
    sampler = client.create_sampler(base_model="tiny")
    status, answer = agent.ask(
        "/register_episode",
        queue=agent.queue,
        sampling_session=sampler.name,
        model="policy",
        episodes=[{"task_id": "t", "task": {"n": number}} for number in range(2)],
    )
    assert status == 200, answer
    ids: list[str] = answer["episode_uuids"]
    return ids


@pytest.mark.parametrize("timeout", ["allow_discard_timeout", "discard_episode_timeout"])
def test_an_episode_is_claimed_played_and_ended(
    client: tinsmith.Client, agent: Agent, registered: list[str], timeout: str
) -> None:
    assert agent.get("/get_engine_status") == {"engine_status": "ENGINE.ROLLING"}
    claimed = agent.claim(episode_type="train", **{timeout: 60})
    assert claimed["success"], claimed
    assert claimed["task"] == {"n": 0}
    assert claimed["episode_uuid"].partition(".")[0] == registered[0]
    with openai.OpenAI(
        base_url=claimed["openai_base_url"], api_key=claimed["openai_api_key"]
    ) as model:
        answer = model.chat.completions.create(
            model=claimed["model"],
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=4,
            extra_body={"return_token_ids": True},
        )
    assert agent.ask("/can_continue_episode", episode_uuid=claimed["episode_uuid"])[1] == {
        "can_continue": True
    }
    output = {"reward": 0.75, "is_success": True, "log_metrics": {"turns": 1.0}}
    for _ in range(2):
        assert agent.ask(
            "/end_episode", episode_uuid=claimed["episode_uuid"], workflow_output=output
        ) == (200, {"success": True})
    episode = client.episodes.get(registered[0])
    assert episode.outcome is not None
    assert episode.outcome.reward == 0.75
    (trajectory,) = episode.trajectories
    sampled = trajectory.tokens[trajectory.mask > 0].tolist()
    assert sampled == answer.choices[0].model_extra["token_ids"]


def test_a_lease_that_ran_out_is_good_for_nothing(agent: Agent, registered: list[str]) -> None:
    lost = agent.claim(allow_discard_timeout=1)
    agent.claim(allow_discard_timeout=60)
    # Nothing is left, so this waits until the first one comes back.
    again = agent.claim(allow_discard_timeout=60, timeout_s=20)
    assert again["episode_uuid"].partition(".")[0] == registered[0]
    assert again["episode_uuid"] != lost["episode_uuid"]
    late = {"episode_uuid": lost["episode_uuid"], "workflow_output": {"reward": 1}}
    status, refusal = agent.ask("/end_episode", **late)
    assert (status, refusal["success"], refusal["reason"]) == (400, False, "LEASE_LOST")
    _, answer = agent.ask("/can_continue_episode", episode_uuid=lost["episode_uuid"])
    assert answer["can_continue"] is False
    on_time = {"episode_uuid": again["episode_uuid"], "workflow_output": {"reward": 0}}
    assert agent.ask("/end_episode", **on_time) == (200, {"success": True})


def test_a_client_that_leaves_takes_no_episode(
    client: tinsmith.Client, deployment: Deployment, agent: Agent
) -> None:
    """It would stay claimed, unplayed, until its lease ran out, for every client that left."""
    body = {"client_uuid": "gone", "queue": agent.queue, "timeout_s": 20}
    headers = {"X-API-Key": deployment.api_key}
    before = _num_left()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"http://{deployment.address}/claim_episode", json=body, headers=headers, timeout=0.3
        )
    deadline_s = time.monotonic() + 10
    while _num_left() == before:
        assert time.monotonic() < deadline_s, "the claim goes on without its client"
        time.sleep(0.01)
    (created,) = client.episodes.create([tinsmith.EpisodeSpec(task={"n": 0})], queue=agent.queue)
    claimed = agent.claim(allow_discard_timeout=60)
    assert claimed["success"], claimed
    assert claimed["episode_uuid"].partition(".")[0] == created.episode_uuid


def _num_left() -> float:
    name = "tinsmith_gateway_http_request_duration_seconds_count"
    return metric(name, endpoint="claim", status="499")


def test_a_task_reaches_the_agent_as_it_was_registered(
    client: tinsmith.Client, agent: Agent
) -> None:
    """Half of a surrogate pair, as text has that was cut in JavaScript, is JSON and no UTF-8."""
    task = {"text": "cut \ud83d"}
    client.episodes.create([tinsmith.EpisodeSpec(task=task)], queue=agent.queue)
    claimed = agent.claim(allow_discard_timeout=60)
    assert claimed["task"] == task


def test_an_aborted_episode_goes_back_to_the_queue(agent: Agent, registered: list[str]) -> None:
    first = agent.claim(discard_episode_timeout=60)
    assert agent.ask("/abort_episode", episode_uuid=first["episode_uuid"], reason="bad tool") == (
        200,
        {"success": True},
    )
    again = agent.claim(discard_episode_timeout=60)
    assert again["episode_uuid"].partition(".")[0] == registered[0]
    assert agent.get(f"/episodes/{registered[0]}")["failures"] != []


def test_the_queue_can_be_looked_at_and_emptied(agent: Agent, registered: list[str]) -> None:
    claimed = agent.claim(allow_discard_timeout=60)
    held = claimed["episode_uuid"]
    assert agent.ask("/is_episode_claimed", episode_uuid=held)[1] == {"success": True}
    _, listed = agent.ask("/get_episode_buffer", queue=agent.queue)
    states = {one["episode_uuid"]: one["episode_status"] for one in listed["buffer"]}
    assert states == {registered[0]: "claimed", registered[1]: "registered"}
    assert agent.get("/get_current_batch_rollout_pool_information")["by_task"] == {"t": 2}
    _, answer = agent.ask(
        "/is_episode_claimed", episode_uuid=registered[1], unregister_if_not_claimed=True
    )
    assert answer == {"success": False}
    assert agent.get(f"/episodes/{registered[1]}")["episode_status"] == "cancelled"
    nothing = agent.claim(allow_discard_timeout=60)
    assert not nothing["success"]
    assert nothing["fail_cause"]


def test_a_repeated_claim_gets_the_same_lease(agent: Agent, registered: list[str]) -> None:
    request = str(uuid.uuid4())
    claims = [agent.claim(allow_discard_timeout=60, request_id=request) for _ in range(2)]
    assert claims[0]["episode_uuid"] == claims[1]["episode_uuid"]
    other = agent.claim(allow_discard_timeout=60)
    assert other["episode_uuid"].partition(".")[0] == registered[1]


def test_a_client_that_has_only_a_url_puts_its_key_there(
    deployment: Deployment, agent: Agent, registered: list[str]
) -> None:
    url = f"http://{deployment.api_key}@{deployment.address}/get_episode_buffer"
    answer = httpx.post(url, json={"queue": agent.queue})
    assert {one["episode_uuid"] for one in answer.json()["buffer"]} == set(registered)
    refused = httpx.post(f"http://{deployment.address}/get_episode_buffer", json={})
    assert refused.status_code == 401
    assert refused.json()["success"] is False


def test_what_a_loop_does_is_refused_with_a_hint(agent: Agent) -> None:
    status, refusal = agent.ask("/start_engine")
    assert status == 400
    assert "rl_episodes" in refusal["fail_cause"]


def test_the_key_of_an_episode_is_for_model_calls_alone(
    deployment: Deployment, agent: Agent, registered: list[str]
) -> None:
    claimed = agent.claim(allow_discard_timeout=60)
    key = {"X-API-Key": claimed["openai_api_key"]}
    base = f"http://{deployment.address}"
    for path in ("/claim_episode", "/get_episode_buffer", "/api/v1/create_session"):
        body = {"client_uuid": "x", "tags": [], "user_metadata": {}, "sdk_version": "1"}
        assert httpx.post(base + path, json=body, headers=key).status_code == 403
