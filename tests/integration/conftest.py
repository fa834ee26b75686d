"""A tiny model, and the services around it, shared by all integration tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.integration.servers import (
    Deployment,
    EmbeddedThread,
    embedded_server,
    pods,
)

from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the developer's own server and caches out of the tests, and take one thread."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TINSMITH_")]:
            patch.delenv(name)
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("TINSMITH_STATE_DIR", str(folder / "state"))
        patch.setenv("TINSMITH_CACHE_DIR", str(folder / "cache"))
        yield


@pytest.fixture(scope="session")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of twenty conversations, for recipes whose score does not matter."""
    path = tmp_path_factory.mktemp("data") / "few.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{number} + 1 ="},
                {"role": "assistant", "content": str(number + 1)},
            ]
        }
        for number in range(20)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyModelConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        initializer_range=0.125,
    )
    return build_tiny_model(tmp_path_factory.mktemp("model"), config)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Deployment]:
    """All services in this process; tests share it and keep to their own runs."""
    with embedded_server(
        tmp_path_factory.mktemp("embedded"), model_dir, sampler={"max_topk_logprobs": 512}
    ) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Deployment]:
    """One process for each pod."""
    with pods(tmp_path_factory.mktemp("processes"), model_dir) as (deployment, _):
        yield deployment


@pytest.fixture
def make_embedded(tmp_path: Path, model_dir: Path) -> Iterator[Callable[..., EmbeddedThread]]:
    """Return a maker of embedded servers that a test may stop and start again."""
    made: list[EmbeddedThread] = []

    def make(**overrides: dict[str, object]) -> EmbeddedThread:
        server = EmbeddedThread(tmp_path / f"data-{len(made)}", model_dir, overrides)
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop()
