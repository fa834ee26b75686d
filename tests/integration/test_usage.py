"""What was used, by whatever protocol: it adds up to the ledger's, and ends at a budget."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tests.fakes.tinker_wire import TOKENS, Wire
from tests.integration.servers import (
    BASE_MODEL,
    Deployment,
    EmbeddedThread,
    create_key,
)
from tests.support.wait import until

import tinsmith
from tinsmith.account.usage_calls import UsageRow
from tinsmith.v1 import trainer_pb2

_ADAM = tinsmith.AdamParams(learning_rate=1e-3)
_PROMPT = [5, 6, 7, 8, 9]
_SAMPLING = tinsmith.SamplingParams(max_tokens=6, temperature=0.0, seed=0, stop=[])
_NUM_TOKENS = 24


@dataclass(frozen=True)
class Server:
    """A server of the module's own, and where it keeps its files."""

    deployment: Deployment
    data_dir: Path

    def user(self, project: str) -> User:
        return User(self.deployment, create_key(self.deployment, project), project)


@dataclass(frozen=True)
class User:
    """A project, and a key of it."""

    deployment: Deployment
    key: str
    project: str

    @property
    def key_id(self) -> str:
        return self.key.split("_")[1]

    def client(self) -> tinsmith.Client:
        return self.deployment.client(api_key=self.key)

    def wire(self) -> Wire:
        url = f"http://{self.deployment.address}"
        return Wire(url, {"x-api-key": f"tml-{self.key.removeprefix('tsk_')}"}, BASE_MODEL)

    def openai(self) -> openai.OpenAI:
        url = f"http://{self.deployment.address}/v1"
        return openai.OpenAI(base_url=url, api_key=self.key, max_retries=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("usage")
    embedded = EmbeddedThread(data_dir, model_dir)
    deployment = embedded.start()
    try:
        yield Server(deployment, data_dir)
    finally:
        embedded.stop()


def datum(seed: int = 0) -> tinsmith.Datum:
    tokens = np.random.default_rng(seed).integers(3, 200, _NUM_TOKENS + 1)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(_NUM_TOKENS)}
    return tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)


def train(client: tinsmith.Client, num_steps: int = 2) -> tinsmith.TrainingRun:
    run = client.create_lora_training_run(BASE_MODEL, rank=4, seed=1)
    for seed in range(num_steps):
        run.forward_backward([datum(seed)], "cross_entropy")
        run.optim_step(_ADAM).result()
    return run


def complete(user: User) -> Any:
    with user.openai() as client:
        return client.completions.create(model=BASE_MODEL, prompt="abc", max_tokens=5, seed=1)


def only(rows: list[UsageRow]) -> UsageRow:
    (row,) = rows
    return row


def counted(row: UsageRow) -> tuple[int, int, int]:
    return (
        row.num_trained_tokens,
        row.num_sampled_tokens,
        row.num_prefilled_tokens + row.num_cached_tokens,
    )


def trained_by_ledger(data_dir: Path, project: str) -> int:
    """Count the tokens of all results in the ledger, from the requests that it keeps."""
    with closing(sqlite3.connect(data_dir / "trainer.db")) as connection:
        rows = connection.execute(
            "SELECT payload FROM operations WHERE kind = 'forward_backward' AND "
            "state = 'succeeded' AND run LIKE ?",
            (f"projects/{project}/%",),
        ).fetchall()
    requests = [trainer_pb2.ForwardBackwardRequest.FromString(payload) for (payload,) in rows]
    return sum(
        chunk.tokens.shape[0]
        for request in requests
        for each in request.data
        for chunk in each.model_input.chunks
    )


def test_usage_of_three_protocols_adds_up_to_the_ledger(server: Server) -> None:
    user = server.user("three")
    with user.client() as admin:
        run = train(admin)
        run.forward([datum(7)], "cross_entropy").result()
        drawn = run.sampler().sample(_PROMPT, sampling_params=_SAMPLING, num_samples=2).result()
        native = (
            2 * _NUM_TOKENS,
            sum(len(sequence.tokens) for sequence in drawn.sequences),
            len(_PROMPT) + _NUM_TOKENS,
        )
        row = until(lambda: _settled(admin, native))
        assert row.engine_seconds > 0
        with closing(user.wire()) as wire:
            wire.model().train(3)
            tinker = wire.samples(wire.sample(wire.sampler(), 0)["request_id"])
        sampled = sum(len(sequence.tokens) // 4 for sequence in tinker.sequences)
        both = (native[0] + 3 * (len(TOKENS) - 1), native[1] + sampled, native[2] + 4)
        until(lambda: _settled(admin, both))
        told = complete(user).usage
        everything = (both[0], both[1] + told.completion_tokens, both[2] + told.prompt_tokens)
        until(lambda: _settled(admin, everything))
        assert everything[0] == trained_by_ledger(server.data_dir, "three")

        by_run = admin.usage.list(by=["run"])
        assert {each.run for each in by_run} >= {"", run.name}
        assert tuple(map(sum, zip(*map(counted, by_run), strict=True))) == everything
        assert counted(only(admin.usage.list(run=run.name))) == native
        assert {each.key_id for each in admin.usage.list(by=["key"])} == {user.key_id}
        assert only(admin.usage.list(by=["day"])).day is not None


def _settled(client: tinsmith.Client, wanted: tuple[int, int, int]) -> UsageRow | None:
    row = only(client.usage.list())
    assert counted(row) <= wanted, "never more than there was"
    return row if counted(row) == wanted else None


def test_stored_bytes_are_those_of_the_checkpoints(server: Server) -> None:
    user = server.user("stored")
    with user.client() as client:
        run = train(client, 1)
        saved = run.save_state("kept").result()
        size = client.checkpoints.get(saved.name).size_bytes
        until(lambda: only(client.usage.list()).stored_bytes == size)
        assert only(client.usage.list(by=["run"])).stored_bytes == size
        client.checkpoints.delete(saved.name)
        until(lambda: only(client.usage.list()).stored_bytes == 0)


def test_a_project_at_its_limit_is_refused_and_another_goes_on(server: Server) -> None:
    poor, rich = server.user("poor"), server.user("rich")
    with server.deployment.client() as operator, poor.client() as client:
        run = train(client, 1)
        until(lambda: only(client.usage.list()).num_trained_tokens == _NUM_TOKENS)
        for what, limit in (("trained-tokens", 30), ("sampled-tokens", 0), ("stored-bytes", 0)):
            operator.usage.set_budget(what, limit, project="poor")
        # A pod that knows of the last one knows of all.
        until(lambda: _refusal_of_save(run))
        until(lambda: _refusal_of_sample(client))

        run.forward_backward([datum()], "cross_entropy").result()
        refused = run.forward_backward([datum()], "cross_entropy")
        with pytest.raises(tinsmith.errors.ResourceExhaustedError) as caught:
            refused.result()
        assert caught.value.reason == "BUDGET_EXCEEDED"
        assert (caught.value.metadata["used"], caught.value.metadata["limit"]) == ("48", "30")
        assert "48 trained tokens of a budget of 30" in str(caught.value)

        with closing(poor.wire()) as wire:
            model = wire.model()
            answer = wire.result(model.submit(model.batch()))
            assert (answer["category"], "budget of 30" in answer["error"]) == ("user", True)
            sampled = wire.result(wire.sample(wire.sampler(), 0)["request_id"])
            assert "budget of 0" in sampled["error"]
        with pytest.raises(openai.RateLimitError) as limited:
            complete(poor)
        assert limited.value.code == "insufficient_quota"
        assert "sampled tokens" in limited.value.message

        with rich.client() as other:
            train(other)
            other.create_sampler(base_model=BASE_MODEL).sample(_PROMPT, 1, _SAMPLING).result()
            complete(rich)
            with pytest.raises(tinsmith.errors.PermissionDeniedError):
                other.usage.set_budget("trained-tokens", 1e9)

        budgets = {each.what: each for each in client.usage.list_budgets()}
        assert budgets["trained-tokens"].limit == 30
        operator.usage.set_budget("trained-tokens", 1_000, project="poor")
        until(lambda: _may_train(run))
        operator.usage.delete_budget("sampled-tokens", project="poor")
        until(lambda: not _refusal_of_sample(client))


def _refusal_of_sample(client: tinsmith.Client) -> str:
    sampler = client.create_sampler(base_model=BASE_MODEL)
    try:
        sampler.sample(_PROMPT, sampling_params=_SAMPLING).result()
    except tinsmith.errors.ResourceExhaustedError as error:
        return error.reason
    return ""


def _refusal_of_save(run: tinsmith.TrainingRun) -> str:
    try:
        run.save_state(uuid.uuid4().hex).result()
    except tinsmith.errors.ResourceExhaustedError as error:
        return error.reason
    return ""


def _may_train(run: tinsmith.TrainingRun) -> bool:
    try:
        run.forward_backward([datum()], "cross_entropy").result()
    except tinsmith.errors.ResourceExhaustedError:
        return False
    return True
