"""The message of what a run trains: scheduler, trainer and checkpoints read and write it alike."""

from __future__ import annotations

from dataclasses import asdict

from tinsmith.v1 import models_pb2
from tinsmith_runtime.adapters import AdapterConfig, FullConfig, LoraConfig
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.rpc.requests import given_fields


def decode_adapter(message: models_pb2.AdapterConfig) -> AdapterConfig:
    """Return what a run trains; `LoraConfig` has the defaults of what is left out.

    Raises:
        InvalidFieldError: If neither kind is set.
    """
    match message.WhichOneof("kind"):
        case "full":
            return FullConfig()
        case "lora":
            return LoraConfig(**given_fields(message.lora))
        case _:
            raise InvalidFieldError("adapter", "must hold lora or full")


def encode_adapter(config: AdapterConfig) -> models_pb2.AdapterConfig:
    """Return the message of what a run trains, with every field set."""
    if isinstance(config, FullConfig):
        return models_pb2.AdapterConfig(full=models_pb2.FullParameterConfig())
    return models_pb2.AdapterConfig(lora=models_pb2.LoraConfig(**asdict(config)))
