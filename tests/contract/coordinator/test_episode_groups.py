"""Groups of episodes on a real coordinator: what is lost is replaced, what is late is left."""

from __future__ import annotations

import _thread
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.episode_player import agents
from tests.fakes.episode_services import Services

import tinsmith
from tinsmith.recipes import episode_groups
from tinsmith.recipes.episode_groups import EpisodeGroups, PlayedGroups
from tinsmith.recipes.rl_episodes import trained_samples
from tinsmith.recipes.tasks.episode_tasks import AgentTask, load_tasks

TASKS = [AgentTask("a", {"number": 1}), AgentTask("b", {"number": 2})]


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path)
    yield services
    services.stop()


@pytest.fixture
def client(services: Services) -> Iterator[tinsmith.Client]:
    with tinsmith.Client(services.scheduler.address, services.key) as client:
        yield client


def playing(
    client: tinsmith.Client, play: Callable[[tinsmith.HeldEpisode], None], num_agents: int = 1
) -> AbstractContextManager[list[BaseException]]:
    return agents(client, play, queue="rl", types=["train"] * num_agents)


def make_groups(client: tinsmith.Client, **options: float) -> EpisodeGroups:
    return EpisodeGroups(client.episodes, queue="rl", sampler="", model="policy", **options)


def play_groups(groups: EpisodeGroups, timeout_s: float = 20) -> PlayedGroups:
    return groups.play(TASKS, group_size=3, episode_type="train", timeout_s=timeout_s)


def test_lost_episodes_are_replaced_and_never_worth_nothing(client: tinsmith.Client) -> None:
    unlucky: list[str] = []

    def play(episode: tinsmith.HeldEpisode) -> None:
        if not unlucky:
            unlucky.append(episode.episode_uuid)
        if episode.episode_uuid in unlucky:
            episode.abort("the tool broke")
        else:
            episode.end(tinsmith.WorkflowOutput(reward=episode.task["number"]))

    # Left over from a loop that was killed: it must not be played.
    client.episodes.create([tinsmith.EpisodeSpec({"number": 9})], queue="rl")
    groups = make_groups(client)
    with playing(client, play):
        played = play_groups(groups)
        np.testing.assert_array_equal(played.rewards_PG, [[1, 1, 1], [2, 2, 2]])
        assert (played.num_replaced, played.num_lost, played.num_late) == (1, 0, 0)
        # The next step sees its own episodes only.
        assert play_groups(groups).num_replaced == 0
    [dead] = client.episodes.list(states=["dead"])
    assert dead.episode_uuid == unlucky[0]
    assert len(dead.failures) == 4


def test_what_is_late_is_cancelled(client: tinsmith.Client) -> None:
    held: list[str] = []
    first = iter([True])

    def play(episode: tinsmith.HeldEpisode) -> None:
        if episode.task["number"] == 2 and next(first, False):
            held.append(episode.episode_uuid)
            agent = client.episodes.agent()
            while agent.can_continue_episode(episode):
                pass
        else:
            episode.end(tinsmith.WorkflowOutput(reward=episode.task["number"]))

    groups = make_groups(client)
    with playing(client, play, num_agents=2):
        played = play_groups(groups, timeout_s=4)
    np.testing.assert_array_equal(played.rewards_PG, [[1, 1, 1], [2, 2, np.nan]])
    assert played.num_late == 1
    assert client.episodes.get(held[0]).state == "cancelled"


def test_a_loop_without_agents_says_what_it_waits_for(
    client: tinsmith.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_groups, "_FIRST_LOOK_S", 0.1)
    said: list[str] = []
    groups = EpisodeGroups(client.episodes, queue="rl", sampler="", model="policy", say=said.append)
    with pytest.raises(tinsmith.OperationTimeoutError):
        groups.play(TASKS, group_size=3, episode_type="eval", timeout_s=0.5)
    assert said[0].startswith("waiting for agents: 6 eval episodes are open on queue rl")
    assert 'episodes.agent(queue="rl").episode()' in said[0]


def test_a_loop_that_is_interrupted_while_it_waits_ends_with_that(client: tinsmith.Client) -> None:
    groups = make_groups(client)
    interrupt = threading.Timer(0.5, _thread.interrupt_main)
    # An interrupt that arrives inside a callback of the collector, as hypothesis has one, is lost.
    gc.disable()
    try:
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            play_groups(groups)
        interrupt.join()
    finally:
        gc.enable()
    assert client.episodes.cancel_queue("rl").num_cancelled == 6


def test_a_loop_without_agents_is_told_so(client: tinsmith.Client) -> None:
    with pytest.raises(tinsmith.OperationTimeoutError, match="start agents that claim train"):
        play_groups(make_groups(client), timeout_s=0.2)
    assert not client.episodes.list(states=["queued"])


def test_a_loop_whose_agents_all_fail_is_told_so(client: tinsmith.Client) -> None:
    def play(episode: tinsmith.HeldEpisode) -> None:
        episode.abort("always")

    groups = make_groups(client, replaced_share=0.5)
    with (
        playing(client, play),
        pytest.raises(tinsmith.AbortedError, match="9 died"),
    ):
        play_groups(groups)


def test_agents_that_do_not_use_their_key_are_found_out(client: tinsmith.Client) -> None:
    def play(episode: tinsmith.HeldEpisode) -> None:
        episode.end(tinsmith.WorkflowOutput(reward=1.0))

    with playing(client, play):
        played = play_groups(make_groups(client))
    with pytest.raises(tinsmith.FailedPreconditionError, match="none of 6 episodes recorded"):
        trained_samples(played)


def test_tasks_come_from_a_file_or_are_sums(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"task_id": "first"}\n\n' + "".join(f'{{"n": {n}}}\n' for n in range(9)))
    tasks = load_tasks(str(path))
    assert [task.task_id for task in tasks.validation] == ["first", "7"]
    assert len(tasks.train) == 8
    assert tasks.draw(1, num_tasks=3, seed=0) == tasks.draw(1, num_tasks=3, seed=0)
    assert len(tasks.draw(1, num_tasks=99, seed=0)) == 8
    path.write_text("no json")
    with pytest.raises(tinsmith.ConfigurationError, match=r"tasks\.jsonl:1: not JSON"):
        load_tasks(str(path))
    path.write_text("1\n")
    with pytest.raises(tinsmith.ConfigurationError, match="at least 2"):
        load_tasks(str(path))
    sums = load_tasks("arithmetic")
    assert set(sums.train[0].content) == {"messages", "answer"}
