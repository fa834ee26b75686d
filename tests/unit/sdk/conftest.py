from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.sdk_fake_server import FakeServer

import tinsmith

FAST = tinsmith.RetryPolicy(budget_s=20, initial_backoff_s=0.02, max_backoff_s=0.1)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TINSMITH_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("TINSMITH_ADDRESS", "TINSMITH_API_KEY", "TINSMITH_PROJECT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def client(server: FakeServer) -> Iterator[tinsmith.Client]:
    with tinsmith.Client(server.address, "tsk_test", retry=FAST) as client:
        yield client


@pytest.fixture
def run(client: tinsmith.Client) -> tinsmith.TrainingRun:
    return client.create_lora_training_run(base_model="tiny", rank=8)


@pytest.fixture
def data() -> list[tinsmith.Datum]:
    return [
        tinsmith.Datum(
            model_input=tinsmith.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
        )
    ]
