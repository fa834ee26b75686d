"""A server of the model that the guides name, shared by all pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.integration.servers import Deployment, embedded_server

from tinsmith_local.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """All services in this process; pages keep to their own runs."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("guides")
    with embedded_server(folder / "data", build_tiny_model(folder / "tiny")) as deployment:
        yield deployment
