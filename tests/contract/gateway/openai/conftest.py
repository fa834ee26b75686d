"""One gateway with a scripted and a real model for all modules of this folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.fakes.openai_harness import PLAIN_MODEL, OpenAiRig

_LEASE_S = 60.0


@pytest.fixture(scope="session")
def openai_rig(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[OpenAiRig]:
    """Start the services once; tests leave them as they found them."""
    plain = tmp_path_factory.mktemp("plain") / "model"
    shutil.copytree(tiny_model, plain)
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0].content }}"
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    models = {PLAIN_MODEL: plain}
    with OpenAiRig(tmp_path_factory.mktemp("openai"), tiny_model, models=models) as rig:
        yield rig


@pytest.fixture
def rig(openai_rig: OpenAiRig) -> OpenAiRig:
    """The services, whose scripted model has forgotten what others asked."""
    openai_rig.sampler.reset()
    openai_rig.coordinator.lease_s = _LEASE_S
    return openai_rig


@pytest.fixture(scope="session")
def shared_client(openai_rig: OpenAiRig) -> Iterator[openai.OpenAI]:
    """One connection for all."""
    with openai_rig.client() as client:
        yield client


@pytest.fixture
def client(rig: OpenAiRig, shared_client: openai.OpenAI) -> openai.OpenAI:
    """OpenAI's client, of the key of the services."""
    del rig
    return shared_client
