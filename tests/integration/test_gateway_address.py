"""The SDK with nothing but the gateway's address, as from another machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.certificates import make_certificates
from tests.integration.servers import BASE_MODEL, EmbeddedThread

import tinsmith
from tinsmith.rpc import transport
from tinsmith_local.process import free_port


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what cuts clients off from every address but one: all others are refused."""

    def build(only: str) -> None:
        class Walled(transport.Connection):
            def __init__(self, address: str, *arguments: Any) -> None:
                nowhere = f"127.0.0.1:{free_port()}"
                super().__init__(address if address == only else nowhere, *arguments)

        monkeypatch.setattr(transport, "Connection", Walled)

    return build


def use_everything(client: tinsmith.Client) -> None:
    """Train, save, load, sample and score."""
    run = client.create_lora_training_run(BASE_MODEL, rank=4)
    tokens = run.get_tokenizer().encode("Repeat: abc def")
    datum = tinsmith.Datum(
        tinsmith.ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    updates = []
    for _ in range(3):
        run.forward_backward([datum])
        updates.append(run.optim_step(tinsmith.AdamParams(learning_rate=1e-3)))
    assert [update.result().version for update in updates] == [1, 2, 3]
    saved = run.save_state("one").result()
    assert run.load_state_with_optimizer(saved).result().version == 3
    drawn = (
        run.sampler().sample(tokens, sampling_params=tinsmith.SamplingParams(max_tokens=4)).result()
    )
    [sequence] = drawn.sequences
    assert len(sequence.tokens) == 4 or sequence.stop_reason == "stop"
    fixed = client.create_sampler(checkpoint=saved)
    assert len(fixed.compute_logprobs(tokens).result()) == len(tokens)


def test_a_client_that_reaches_the_gateway_alone(
    make_embedded: Callable[..., EmbeddedThread], wall: Callable[[str], None]
) -> None:
    deployment = make_embedded(gateway={"pins_clients": True}).start()
    wall(deployment.address)
    with deployment.client() as client:
        use_everything(client)


def test_environments_are_reached_through_the_gateway(
    make_embedded: Callable[..., EmbeddedThread], wall: Callable[[str], None]
) -> None:
    deployment = make_embedded(gateway={"pins_clients": True}).start()
    wall(deployment.address)
    with deployment.client() as client:
        assert client.environments.list()


def test_without_the_word_of_the_gateway_it_would_go_to_the_pods(
    make_embedded: Callable[..., EmbeddedThread], wall: Callable[[str], None]
) -> None:
    deployment = make_embedded().start()
    wall(deployment.address)
    with (
        tinsmith.Client(
            deployment.address, deployment.api_key, retry=tinsmith.RetryPolicy(budget_s=0.2)
        ) as client,
        pytest.raises(tinsmith.RunUndeliverableError),
    ):
        client.create_lora_training_run(BASE_MODEL, rank=4).optim_step().result(timeout=20)


def test_a_private_certificate(
    make_embedded: Callable[..., EmbeddedThread], wall: Callable[[str], None], tmp_path: Path
) -> None:
    made = make_certificates(tmp_path)
    deployment = make_embedded(
        gateway={
            "pins_clients": True,
            "tls_certificate": made.certificate,
            "tls_key": made.key,
        }
    ).start()
    assert deployment.address.startswith("https://127.0.0.1:")
    wall(deployment.address)
    with deployment.client(ca_file=made.ca_file) as client:
        use_everything(client)


def test_a_file_of_authorities_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(tinsmith.ConfigurationError, match="TINSMITH_CA_FILE"):
        tinsmith.Client("https://127.0.0.1:1", "tsk_none", ca_file=tmp_path / "none.pem")
