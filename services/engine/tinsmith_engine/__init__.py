"""Models, arena, packed operations and losses: everything that computes.

The engine knows torch and nothing of the wire. A trainer pod drives `Engine`, a sampler pod drives
`Sampler`, and one `EngineThread` owns both where they share a process. Names are resolved on first
use, so that a servicer can validate a batch without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinsmith_engine.batches import validate_adam, validate_batch
    from tinsmith_engine.engine import Engine
    from tinsmith_engine.loss_specs import LOSS_NAMES, LOSS_SPECS, LossSpec
    from tinsmith_engine.requests import (
        PromptAlternatives,
        PromptLogprobs,
        SampledSequence,
        SampledToken,
        SampleRequest,
        TokenListener,
        check_target_tokens,
        validate_sample_request,
    )
    from tinsmith_engine.sampling import Sampler
    from tinsmith_engine.thread import EngineThread
    from tinsmith_engine.values import (
        AdamParams,
        AdapterConfig,
        BatchRequest,
        CustomInput,
        CustomLoss,
        Datum,
        ForwardResult,
        FullConfig,
        LoraConfig,
        ModelInfo,
        OptimStepResult,
        Published,
        RunState,
    )

_HOMES = {
    "AdamParams": "values",
    "AdapterConfig": "values",
    "BatchRequest": "values",
    "CustomInput": "values",
    "CustomLoss": "values",
    "Datum": "values",
    "Engine": "engine",
    "EngineThread": "thread",
    "ForwardResult": "values",
    "FullConfig": "values",
    "LOSS_NAMES": "loss_specs",
    "LOSS_SPECS": "loss_specs",
    "LoraConfig": "values",
    "LossSpec": "loss_specs",
    "ModelInfo": "values",
    "OptimStepResult": "values",
    "PromptAlternatives": "requests",
    "PromptLogprobs": "requests",
    "Published": "values",
    "RunState": "values",
    "SampleRequest": "requests",
    "SampledSequence": "requests",
    "SampledToken": "requests",
    "Sampler": "sampling",
    "TokenListener": "requests",
    "check_target_tokens": "requests",
    "validate_adam": "batches",
    "validate_batch": "batches",
    "validate_sample_request": "requests",
}

__all__ = [
    "LOSS_NAMES",
    "LOSS_SPECS",
    "AdamParams",
    "AdapterConfig",
    "BatchRequest",
    "CustomInput",
    "CustomLoss",
    "Datum",
    "Engine",
    "EngineThread",
    "ForwardResult",
    "FullConfig",
    "LoraConfig",
    "LossSpec",
    "ModelInfo",
    "OptimStepResult",
    "PromptAlternatives",
    "PromptLogprobs",
    "Published",
    "RunState",
    "SampleRequest",
    "SampledSequence",
    "SampledToken",
    "Sampler",
    "TokenListener",
    "check_target_tokens",
    "validate_adam",
    "validate_batch",
    "validate_sample_request",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
