"""An episode that the server plays: which failures are of the batch, and not of one episode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tinsmith.environments.environment_forms import EnvironmentClient
from tinsmith.rollouts import (
    ChatTemplateError,
    Play,
    RolloutRunner,
    SamplerFailedError,
    TemplateRewritesHistoryError,
    Trajectory,
)
from tinsmith.rollouts.adapters import read_image_rules
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.event_loop_thread import BackgroundLoop
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.v1 import rollout_pb2, scheduler_pb2
from tinsmith_coordinator.rpc.service_players import SamplerTokenizers, ServicePlayer
from tinsmith_local.tiny_model import write_tokenizer
from tinsmith_runtime.errors import (
    ChatTemplateRefusedError,
    InvalidFieldError,
    UnavailableError,
)


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


@pytest.mark.parametrize(
    ("cause", "is_fatal"),
    [
        pytest.param(InvalidFieldError("prompt", "is too long"), True, id="wrong-for-every-play"),
        pytest.param(UnavailableError("away"), False, id="may-pass"),
        pytest.param(ValueError("malformed"), False, id="of-one-answer"),
    ],
)
async def test_what_every_play_would_meet_fails_the_batch(
    background: BackgroundLoop, cause: Exception, is_fatal: bool
) -> None:
    error = SamplerFailedError("the sampler failed")
    error.__cause__ = cause
    runner = cast(RolloutRunner, _FailingRunner(error))
    request = rollout_pb2.GenerateRolloutsRequest(environment="projects/p/environments/e")
    request.tasks.add(seed=1)
    player = ServicePlayer(background, cast(EnvironmentClient, None), runner, request)
    if is_fatal:
        with pytest.raises(type(cause)):
            await player.play(Play(0, 0))
        return
    played = await player.play(Play(0, 0))
    assert (played.content, played.num_tokens) == (b"", 0)
    assert played.failure is not None
    assert (played.failure.reason, played.failure.problem) == (
        "sampler_failed",
        "the sampler failed",
    )


class _Scheduler:
    """Two models of one name: of a job's pool, and the shared one; remembers what was asked."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.asked: list[scheduler_pb2.GetTokenizerRequest] = []
        self._files = files

    async def call(
        self, endpoint: object, method: object, request: scheduler_pb2.GetTokenizerRequest
    ) -> scheduler_pb2.Tokenizer:
        del endpoint, method
        self.asked.append(request)
        digest = f"of-{request.pool}"
        is_known = request.known_digest == digest
        return scheduler_pb2.Tokenizer(digest=digest, files={} if is_known else self._files)


async def test_the_tokenizer_is_that_of_the_pool_of_the_sampler(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, max_tokens=64)
    scheduler = _Scheduler({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    settings = SimpleNamespace(project="mine")
    core = SimpleNamespace(
        transport=scheduler, scheduler=None, settings=settings, project="projects/mine"
    )
    tokenizers = SamplerTokenizers()
    found = []
    for pool in ("space.job", "", "space.job"):
        sampler: Any = SimpleNamespace(base_model="tiny", chat_template="", pool=pool)
        found.append(await tokenizers.of(cast(ClientCore, core), cast(Sampler, sampler)))
    assert [(each.project, each.pool) for each in scheduler.asked] == [
        ("mine", "space.job"),
        ("mine", ""),
        ("mine", "space.job"),
    ]
    assert [each.known_digest for each in scheduler.asked] == ["", "", "of-space.job"]
    assert found[0] is found[2]
    assert found[0] is not found[1]
    assert all(isinstance(each, Tokenizer) for each in found)


class _Offers:
    """A scheduler with a model of the same name in two pools; only that of the job reads images."""

    async def call(
        self, endpoint: object, method: object, request: scheduler_pb2.GetCapabilitiesRequest
    ) -> scheduler_pb2.Capabilities:
        del endpoint, method
        answer = scheduler_pb2.Capabilities()
        model = answer.models.add().model
        model.base_model = "tiny"
        if request.pool:
            model.reads_images = True
            model.images.SetInParent()
        return answer


@pytest.mark.parametrize(("pool", "reads"), [("space.job", True), ("", False)])
async def test_the_image_rules_are_those_of_the_pool_of_the_sampler(pool: str, reads: bool) -> None:
    core = SimpleNamespace(transport=_Offers(), scheduler=None, project="projects/mine")
    sampler: Any = SimpleNamespace(base_model="tiny", pool=pool)

    rules = await read_image_rules(cast(ClientCore, core), cast(Sampler, sampler))

    assert (rules is not None) is reads
