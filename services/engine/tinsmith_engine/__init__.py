"""Models, arena, packed operations and losses: everything that computes.

The engine knows torch and nothing of the wire. A trainer pod drives `Engine`, a sampler pod drives
`Sampler`, and one `EngineThread` owns both where they share a process. Names are resolved on first
use, so that a servicer can validate a batch without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinsmith_engine.base.engine_thread import EngineThread, Parts, timed
    from tinsmith_engine.base.loss_specs import LOSS_NAMES, LOSS_SPECS, LossSpec
    from tinsmith_engine.base.types import (
        AdamParams,
        AdapterConfig,
        BatchRequest,
        BatchResult,
        Datum,
        FullConfig,
        LoraConfig,
        ModelInfo,
        OptimStepResult,
        RunState,
        WeightVersion,
    )
    from tinsmith_engine.sampling.request.sample_request import (
        PromptAlternatives,
        PromptLogprobs,
        SampledSequence,
        SampledToken,
        SampleRequest,
        Timeline,
        TokenListener,
        check_target_tokens,
        validate_sample_request,
    )
    from tinsmith_engine.sampling.sampler import Sampler
    from tinsmith_engine.training.batch_validation import validate_adam, validate_batch
    from tinsmith_engine.training.engine import Engine

_HOMES = {
    "AdamParams": "base.types",
    "AdapterConfig": "base.types",
    "BatchRequest": "base.types",
    "Datum": "base.types",
    "Engine": "training.engine",
    "EngineThread": "base.engine_thread",
    "BatchResult": "base.types",
    "FullConfig": "base.types",
    "LOSS_NAMES": "base.loss_specs",
    "LOSS_SPECS": "base.loss_specs",
    "LoraConfig": "base.types",
    "LossSpec": "base.loss_specs",
    "ModelInfo": "base.types",
    "OptimStepResult": "base.types",
    "Parts": "base.engine_thread",
    "PromptAlternatives": "sampling.request.sample_request",
    "PromptLogprobs": "sampling.request.sample_request",
    "WeightVersion": "base.types",
    "RunState": "base.types",
    "SampleRequest": "sampling.request.sample_request",
    "Timeline": "sampling.request.sample_request",
    "SampledSequence": "sampling.request.sample_request",
    "SampledToken": "sampling.request.sample_request",
    "Sampler": "sampling.sampler",
    "TokenListener": "sampling.request.sample_request",
    "check_target_tokens": "sampling.request.sample_request",
    "timed": "base.engine_thread",
    "validate_adam": "training.batch_validation",
    "validate_batch": "training.batch_validation",
    "validate_sample_request": "sampling.request.sample_request",
}

__all__ = [
    "LOSS_NAMES",
    "LOSS_SPECS",
    "AdamParams",
    "AdapterConfig",
    "BatchRequest",
    "BatchResult",
    "Datum",
    "Engine",
    "EngineThread",
    "FullConfig",
    "LoraConfig",
    "LossSpec",
    "ModelInfo",
    "OptimStepResult",
    "Parts",
    "PromptAlternatives",
    "PromptLogprobs",
    "RunState",
    "SampleRequest",
    "SampledSequence",
    "SampledToken",
    "Sampler",
    "Timeline",
    "TokenListener",
    "WeightVersion",
    "check_target_tokens",
    "timed",
    "validate_adam",
    "validate_batch",
    "validate_sample_request",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
