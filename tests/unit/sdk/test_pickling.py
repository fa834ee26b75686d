"""Clients, runs and samplers travel to other processes by what they name, and never with a key."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from tests.fakes.sdk_fake_server import FakeServer

import tinsmith

KEY = "tsk_test"


@pytest.fixture(autouse=True)
def _key_of_the_other_process(
    client: tinsmith.Client, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setenv("TINSMITH_API_KEY", KEY)
    yield
    monkeypatch.setenv("TINSMITH_API_KEY", KEY)
    opened = travel(client)
    assert isinstance(opened, tinsmith.Client)
    opened.close()


def travel(handle: object) -> object:
    """Return a handle as another process gets it."""
    sent = pickle.dumps(handle)
    assert KEY.encode() not in sent
    return pickle.loads(sent)


def test_handles_of_one_server_share_a_client(client: tinsmith.Client) -> None:
    first, second = travel(client), travel(client)
    assert isinstance(first, tinsmith.Client)
    assert first is second
    assert first is not client
    assert (first.address, first.project) == (client.address, client.project)
    first.close()
    third = travel(client)
    assert isinstance(third, tinsmith.Client)
    assert not third.is_closed
    third.close()


def test_a_run_goes_on_in_the_other_process(run: tinsmith.TrainingRun) -> None:
    other = travel(run)
    assert isinstance(other, tinsmith.TrainingRun)
    assert other.name == run.name
    assert other is not run


@pytest.mark.parametrize("source", ["base_model", "run"])
def test_a_sampler_opens_on_the_same_weights(
    client: tinsmith.Client, run: tinsmith.TrainingRun, source: str
) -> None:
    sampler = client.create_sampler(base_model="tiny") if source == "base_model" else run.sampler()
    other = travel(sampler)
    assert isinstance(other, tinsmith.Sampler)
    assert other.source == sampler.source
    assert other is not sampler
    assert other.sample([1, 2]).result().sequences


def test_a_future_says_that_it_stays(run: tinsmith.TrainingRun) -> None:
    with pytest.raises(TypeError, match="result arrives in the process that made the call"):
        pickle.dumps(run.optim_step())


def test_a_key_is_needed_where_a_handle_arrives(
    server: FakeServer, client: tinsmith.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pickle.dumps(client)
    monkeypatch.delenv("TINSMITH_API_KEY")
    with pytest.raises(tinsmith.ConfigurationError, match="no API key of a Tinsmith server"):
        pickle.loads(sent)
