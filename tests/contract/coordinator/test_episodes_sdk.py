"""The SDK's two sides of episodes, against a real scheduler and a real coordinator."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.episode_services import Services

import tinsmith
from tinsmith.episodes import claims
from tinsmith.episodes.agent import openai_base_url

Output = tinsmith.WorkflowOutput


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path)
    yield services
    services.stop()


@pytest.fixture
def client(services: Services) -> Iterator[tinsmith.Client]:
    retry = tinsmith.RetryPolicy(budget_s=20, initial_backoff_s=0.02, max_backoff_s=0.2)
    with tinsmith.Client(
        services.scheduler.address, services.key, retry=retry, operation_timeout_s=20
    ) as client:
        yield client


def test_an_episode_from_registration_to_reward(client: tinsmith.Client) -> None:
    spec = tinsmith.EpisodeSpec({"question": "1+1"}, task_id="sum")
    [created] = client.episodes.create([spec], model="policy")
    assert (created.state, created.is_open, created.task) == ("queued", True, {"question": "1+1"})
    agent = client.episodes.agent(client_id="me")
    uuid, openai = agent.begin_episode(discard_episode_timeout=60)
    assert uuid == openai.episode_uuid == created.episode_uuid
    assert openai.base_url == f"http://{client.address}/v1"
    assert (openai.model, openai.api_key[:4]) == ("policy", "tse-")
    assert openai.api_key not in repr(openai)
    assert agent.can_continue_episode(uuid)
    assert agent.held(uuid).task == {"question": "1+1"}
    ended = agent.end_episode(
        uuid, Output(0.5, is_success=True, metadata={"turns": [1]}, log_metrics={"turns": 2})
    )
    assert (ended.state, ended.client_id, ended.outcome) == (
        "submitted",
        "me",
        tinsmith.EpisodeOutcome(0.5, [], True, {"turns": 2.0}, {"turns": [1]}),
    )
    assert client.episodes.get(uuid).revision == ended.revision == 1
    assert [each.name for each in client.episodes.list(states=["submitted"])] == [created.name]
    with pytest.raises(tinsmith.FailedPreconditionError, match="not held"):
        agent.end_episode(uuid, Output(0.5))


async def test_the_same_in_an_event_loop(client: tinsmith.Client) -> None:
    [created] = await client.episodes.create_async([tinsmith.EpisodeSpec()])
    agent = client.episodes.agent()
    uuid, _ = await agent.begin_episode_async(allow_discard_timeout=60)
    assert await agent.can_continue_episode_async(uuid)
    await agent.abort_episode_async(uuid, "the tool broke")
    uuid, _ = await agent.begin_episode_async()
    ended = await agent.end_episode_async(uuid, Output(1.0))
    assert ended.name == created.name
    assert ended.failures == [f"attempt 1 by {agent.client_id}: aborted: the tool broke"]
    assert (await client.episodes.get_async(uuid)).state == "submitted"


def test_a_block_ends_its_episode_one_way_or_another(client: tinsmith.Client) -> None:
    client.episodes.create([tinsmith.EpisodeSpec()])
    agent = client.episodes.agent()
    with pytest.raises(ZeroDivisionError), agent.episode() as episode:
        _ = 1 / 0
    with pytest.raises(tinsmith.FailedPreconditionError, match="without a reward"), agent.episode():
        pass
    with agent.episode() as episode:
        assert episode.openai.episode_uuid == episode.episode_uuid
        ended = episode.end(Output(1.0))
    assert ended.failures == [
        f"attempt 1 by {agent.client_id}: aborted: ZeroDivisionError: division by zero",
        f"attempt 2 by {agent.client_id}: aborted: the agent ended without a reward",
    ]


def test_what_is_waited_for_is_said(client: tinsmith.Client) -> None:
    with pytest.raises(tinsmith.OperationTimeoutError, match="none is open"):
        client.episodes.agent().begin_episode(timeout_s=0.05)
    with pytest.raises(TypeError, match="not both"):
        client.episodes.agent().begin_episode(60, allow_discard_timeout=60)
    with pytest.raises(ValueError, match="episode_type"):
        client.episodes.agent().begin_episode(episode_type="test")


def test_a_lost_lease_is_noticed_and_the_reward_refused(
    services: Services, client: tinsmith.Client
) -> None:
    client.episodes.create([tinsmith.EpisodeSpec()])
    agent = client.episodes.agent()
    uuid, _ = agent.begin_episode(60)
    services.clock.offset_s += 61
    assert not agent.can_continue_episode(uuid)
    with pytest.raises(tinsmith.AbortedError) as failure:
        agent.end_episode(uuid, Output(1.0))
    assert failure.value.reason == "LEASE_LOST"
    assert "claim another episode" in str(failure.value)


def test_a_heartbeat_keeps_an_episode(services: Services, client: tinsmith.Client) -> None:
    client.episodes.create([tinsmith.EpisodeSpec()])
    agent = client.episodes.agent()
    uuid, _ = agent.begin_episode(1)
    before = client.episodes.get(uuid).lease_expire_time
    assert before is not None
    while True:
        after = client.episodes.get(uuid)
        assert after.lease_expire_time is not None
        if after.lease_expire_time > before:
            break
    assert (after.state, after.num_attempts) == ("claimed", 1)


def test_a_coordinator_that_starts_elsewhere_is_found(
    services: Services, client: tinsmith.Client
) -> None:
    created = client.episodes.create([tinsmith.EpisodeSpec() for _ in range(2)])
    agent = client.episodes.agent()
    first, _ = agent.begin_episode()
    watch = client.episodes.watch(timeout_s=60)
    agent.end_episode(first, Output(0.25))
    assert next(watch).episode_uuid == first
    second, _ = agent.begin_episode()
    services.stop_coordinator()
    services.start_coordinator()
    agent.end_episode(second, Output(0.5))
    # The same watch goes on, and tells nothing twice.
    assert next(watch).name == created[1].name
    watch.close()  # type: ignore[attr-defined]
    again = client.episodes.watch(after_revision=1, timeout_s=60)
    assert [each.revision for each in itertools.islice(again, 1)] == [2]
    again.close()  # type: ignore[attr-defined]


def test_cancelling_nothing_cancels_nothing(client: tinsmith.Client) -> None:
    created = client.episodes.create([tinsmith.EpisodeSpec() for _ in range(3)])
    assert client.episodes.cancel([]) == 0
    assert client.episodes.cancel([created[0], created[1].episode_uuid]) == 2
    cancelled = client.episodes.cancel_queue()
    assert (cancelled.num_cancelled, cancelled.revision) == (1, 3)
    assert list(client.episodes.watch(timeout_s=0.5))[-1].state == "cancelled"


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:7077", "http://127.0.0.1:7077/v1"),
        ("https://tinsmith.example:443", "https://tinsmith.example:443/v1"),
        ("http://tinsmith.example:80/", "http://tinsmith.example:80/v1"),
    ],
)
def test_the_openai_endpoint_is_that_of_the_server(address: str, url: str) -> None:
    assert openai_base_url(address) == url


def test_an_agent_takes_both_types_of_episodes(client: tinsmith.Client) -> None:
    types = ["eval", "train", "eval"]
    client.episodes.create([tinsmith.EpisodeSpec(episode_type=each) for each in types])
    agent = client.episodes.agent()
    played = []
    for _ in types:
        with agent.episode(timeout_s=10) as episode:
            played.append(episode.type)
            episode.end(Output(1.0))
    assert sorted(played) == sorted(types)
    with (
        pytest.raises(tinsmith.OperationTimeoutError, match=r"of type .* or an .* of type"),
        agent.episode(timeout_s=0.1),
    ):
        pass


def test_an_agent_that_waits_for_one_type_gets_it_while_the_other_is_open(
    client: tinsmith.Client,
) -> None:
    client.episodes.create([tinsmith.EpisodeSpec(episode_type="train")])
    [created] = client.episodes.create([tinsmith.EpisodeSpec(episode_type="eval")])
    with client.episodes.agent().episode(episode_type="eval", timeout_s=10) as episode:
        assert (episode.type, episode.episode.name) == ("eval", created.name)
        episode.end(Output(1.0))


def test_an_agent_gets_an_episode_that_is_registered_while_it_waits(
    client: tinsmith.Client,
) -> None:
    agent = client.episodes.agent()
    later = threading.Timer(
        0.5, client.episodes.create, [[tinsmith.EpisodeSpec(episode_type="eval")]]
    )
    later.start()
    with agent.episode(timeout_s=15) as episode:
        assert episode.type == "eval"
        episode.end(Output(1.0))
    later.join()


def test_an_agent_says_what_it_waits_for_and_what_there_is_instead(
    client: tinsmith.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(claims, "_TOLD_AFTER_S", 0.1)
    client.episodes.create([tinsmith.EpisodeSpec(episode_type="eval")] * 2, queue="rl")
    agent = client.episodes.agent(queue="rl")
    later = threading.Timer(
        1.0, client.episodes.create, [[tinsmith.EpisodeSpec()]], {"queue": "rl"}
    )
    monkeypatch.setattr(claims, "_LONG_POLL_S", 0.3)
    later.start()
    with agent.episode(episode_type="train", timeout_s=15) as episode:
        episode.end(Output(1.0))
    later.join()
    assert [record.getMessage() for record in caplog.records] == [
        "waiting: no episode of type train is open on queue rl; 2 of type eval are"
    ]
