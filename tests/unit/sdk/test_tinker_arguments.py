"""Arguments of the `tinker` SDK that programs bring along: taken with effect, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.sdk_fake_server import FakeServer, unavailable

import tinsmith
from tinsmith import RetryPolicy, SamplingParams

AT_ONCE = RetryPolicy(budget_s=0.0)


def sample(sampler: tinsmith.Sampler) -> tinsmith.SampleResponse:
    return sampler.sample([1, 2], 1, SamplingParams(max_tokens=2)).result(timeout=30)


def test_retry_config_is_that_of_the_sampler_alone(
    server: FakeServer, client: tinsmith.Client
) -> None:
    hasty = client.create_sampling_client(None, "tiny", AT_ONCE)
    patient = client.create_sampling_client(base_model="tiny")

    server.state.fail_calls["Sample"] = [unavailable()]
    with pytest.raises(tinsmith.UnavailableError):
        sample(hasty)

    server.state.fail_calls["Sample"] = [unavailable()]
    assert sample(patient).sequences
    assert sample(hasty).sequences


def test_retry_config_holds_for_streams(server: FakeServer, client: tinsmith.Client) -> None:
    hasty = client.create_sampling_client(base_model="tiny", retry_config=AT_ONCE)
    server.state.fail_calls["StreamSample"] = [unavailable()]
    with pytest.raises(tinsmith.UnavailableError), hasty.stream([1, 2]) as stream:
        list(stream)


def test_retry_config_of_saved_weights(
    server: FakeServer, client: tinsmith.Client, run: tinsmith.TrainingRun
) -> None:
    sampler = run.save_weights_and_get_sampling_client("w1", AT_ONCE)
    server.state.fail_calls["Sample"] = [unavailable()]
    with pytest.raises(tinsmith.UnavailableError):
        sample(sampler)


def test_a_retry_config_of_another_sdk_is_refused_with_what_to_give(
    client: tinsmith.Client,
) -> None:
    foreign: Any = object()
    with pytest.raises(tinsmith.ConfigurationError, match=r"give tinsmith\.RetryPolicy"):
        client.create_sampling_client(base_model="tiny", retry_config=foreign)


def test_overwrite_is_refused_with_what_to_do(
    server: FakeServer, run: tinsmith.TrainingRun
) -> None:
    with pytest.raises(tinsmith.ConfigurationError, match=r"checkpoints\.delete\('projects/.*/s1'"):
        run.save_state("s1", None, True)
    assert not server.state.calls["SaveCheckpoint"]
    # No number is spent: what follows is not held up.
    saved = run.save_state("s1", None, False, {"team": "a"})
    assert saved.result(timeout=30).name.endswith("/checkpoints/s1")
