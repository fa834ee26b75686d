"""One tiny base model and one engine for all contract tests that need the real thing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.fakes.held_protocol import Protocol
from tests.fakes.trainer_harness import TrainerRig, running_trainer

from tinsmith_engine.host import EngineHost
from tinsmith_gateway import app as gateway_app
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Where a pod keeps its tables: empty for a file, or the URL of a database."""
    if request.param == "sqlite":
        return ""
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyModelConfig(
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=4096,
    )
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), config)


@pytest.fixture(scope="session")
def engine_host(tiny_model: Path) -> Iterator[EngineHost]:
    host = EngineHost.load(
        {"tiny": str(tiny_model)},
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_resident_runs=16,
    )
    yield host
    host.thread.close(10)


@pytest.fixture
async def rig(tmp_path: Path, engine_host: EngineHost) -> AsyncIterator[TrainerRig]:
    """A trainer of the test's own; files about other pods have rigs of their own."""
    async with running_trainer(tmp_path / "data", engine_host) as rig:
        yield rig


@pytest.fixture
def protocol(monkeypatch: pytest.MonkeyPatch) -> Protocol:
    """Serve the small protocol in place of the OpenAI API."""
    made = Protocol()
    monkeypatch.setattr(gateway_app.openai, "routes", made.routes)
    return made
