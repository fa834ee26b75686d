"""Pods in processes that speak TLS to each other, with certificates of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.certificates import make_pod_certificates
from tests.integration.servers import BASE_MODEL, Deployment, pods

import tinsmith
from tinsmith.rollouts import RolloutConfig


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    assert "scheduler" in make_pod_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, certificates: Path
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("tls")
    more = ("gateway", "environment", "coordinator")
    running = pods(folder, model_dir, *more, certificates=certificates)
    with running as (found, _):
        yield found


def test_a_client_trains_and_samples_through_the_gateway(
    deployment: Deployment, certificates: Path
) -> None:
    with deployment.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4)
        tokens = run.get_tokenizer().encode("Repeat: abc def")
        datum = tinsmith.Datum(
            tinsmith.ModelInput.from_ints(tokens[:-1]),
            {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for step in range(3):
            run.forward_backward([datum])
            update = run.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()
            assert update.version == step + 1
            # Renewed under the pods' feet.
            make_pod_certificates(certificates)
        saved = run.save_state("one").result()
        parameters = tinsmith.SamplingParams(max_tokens=4)
        drawn = run.sampler().sample(tokens, sampling_params=parameters).result()
        assert drawn.sequences[0].tokens
        fixed = client.create_sampler(checkpoint=saved)
        assert len(fixed.compute_logprobs(tokens).result()) == len(tokens)


def test_the_coordinator_plays_over_tls(deployment: Deployment) -> None:
    with deployment.client() as client:
        played = client.environments.play(
            "guessing",
            sampler=client.create_sampler(base_model=BASE_MODEL),
            config=RolloutConfig(max_turns=2, max_tokens_per_turn=4),
            rollouts="server",
        )
        assert len(played.groups) == 1
