"""An episode that the server plays: which failures are of the batch, and not of one episode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from tinsmith.environments.client import EnvironmentClient
from tinsmith.rollouts import (
    ChatTemplateError,
    Play,
    RolloutRunner,
    TemplateRewritesHistoryError,
    Trajectory,
)
from tinsmith.rpc.event_loop_thread import BackgroundLoop
from tinsmith.v1 import rollout_pb2
from tinsmith_coordinator.rpc.service_players import ServicePlayer
from tinsmith_runtime.errors import ChatTemplateRefusedError


class _FailingRunner:
    """A runner whose chat template does not render what it is given."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def run(self, *_: object, **__: object) -> Trajectory:
        raise self._error


@pytest.fixture
def background() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ChatTemplateError("the template has no place for tools"), id="cannot"),
        pytest.param(TemplateRewritesHistoryError(2, 17), id="rewrites"),
    ],
)
async def test_a_conversation_that_no_template_renders_fails_the_batch(
    background: BackgroundLoop, error: ChatTemplateError | TemplateRewritesHistoryError
) -> None:
    request = rollout_pb2.GenerateRolloutsRequest(environment="projects/p/environments/e")
    request.tasks.add(seed=1)
    player = ServicePlayer(
        background,
        cast(EnvironmentClient, None),
        cast(RolloutRunner, _FailingRunner(error)),
        request,
    )
    with pytest.raises(ChatTemplateRefusedError) as refusal:
        await player.play(Play(0, 0))
    assert refusal.value.reason == "CHAT_TEMPLATE_REFUSED"
    assert refusal.value.message == error.message
