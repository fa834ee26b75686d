"""One real vLLM on the CPU behind a real sampler pod, and what is held against it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from tests.fakes.sampler_harness import BASE_MODEL, SamplerRig
from tests.support.pod_keys import POD_KEY
from tinsmith_engine.host import EngineHost
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.vllm.source import VllmEngines

PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"
STALL_TIMEOUT_S = 20.0


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyModelConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=96,
        max_position_embeddings=1024,
    )
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), config)


@pytest.fixture(scope="session")
def engine_host(tiny_model: Path) -> Iterator[EngineHost]:
    """The embedded engine: it makes the adapters, and knows their layout."""
    host = EngineHost.load(
        {BASE_MODEL: str(tiny_model)},
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_resident_runs=4,
    )
    yield host
    host.thread.close(10)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(tiny_model: Path) -> AsyncIterator[VllmEngines]:
    config = SamplerConfig(
        storage_uri="file:///nowhere",
        scheduler_address="localhost:1",
        pod_key=POD_KEY,
        engine="vllm",
        vllm_python=os.environ.get("TINSMITH_TEST_VLLM_PYTHON", str(PYTHON)),
        vllm_max_adapter_rank=16,
        vllm_stall_timeout_s=STALL_TIMEOUT_S,
        base_models=f"{BASE_MODEL}={tiny_model}",
        cache_bytes=2**30,
        max_concurrent_sequences=64,
        num_threads=1,
    )
    engines = await VllmEngines.start(config)
    yield engines
    await engines.close()


@pytest_asyncio.fixture(loop_scope="session")
async def rig(
    tmp_path: Path, engine_host: EngineHost, vllm: VllmEngines
) -> AsyncIterator[SamplerRig]:
    rig = SamplerRig(tmp_path, engine_host, source=vllm, max_loaded_weights=4)
    await rig.start()
    yield rig
    await rig.stop()


class Reference:
    """transformers and PEFT, one sequence at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def base(self) -> torch.nn.Module:
        """Return the base model."""
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            self._directory, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval()

    def adapted(self, tensors: Mapping[str, torch.Tensor], *, rank: int, alpha: float) -> PeftModel:
        """Return the base model with an adapter."""
        modules = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors})
        config = PeftConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM")
        model = get_peft_model(self.base(), config)
        loaded = set_peft_model_state_dict(model, dict(tensors))
        assert not loaded.unexpected_keys
        return model.eval()

    def full(self, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        """Return the base model with other weights."""
        model = self.base()
        loaded = model.load_state_dict(dict(tensors), strict=False)
        assert not loaded.unexpected_keys
        return model


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@torch.no_grad()
def logprobs_of(
    model: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int]
) -> np.ndarray:
    """Return the log-probability of each token of a completion, float64 [T]."""
    tokens = torch.tensor([[*prompt, *completion]])
    scores = model(tokens).logits[0].double().log_softmax(-1)
    rows = scores[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(completion)[:, None])[:, 0].numpy()
