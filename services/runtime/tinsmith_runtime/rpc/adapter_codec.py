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
    template = message.chat_template
    ends = tuple(message.stop_token_ids)
    match message.WhichOneof("kind"):
        case "full":
            return FullConfig(chat_template=template, stop_token_ids=ends)
        case "lora":
            given = given_fields(message.lora)
            return LoraConfig(**given, chat_template=template, stop_token_ids=ends)
        case _:
            raise InvalidFieldError("adapter", "must hold lora or full")


def encode_adapter(config: AdapterConfig) -> models_pb2.AdapterConfig:
    """Return the message of what a run trains, with every field set."""
    given = asdict(config)
    message = models_pb2.AdapterConfig(
        chat_template=given.pop("chat_template"), stop_token_ids=given.pop("stop_token_ids")
    )
    if isinstance(config, FullConfig):
        message.full.SetInParent()
    else:
        message.lora.CopyFrom(models_pb2.LoraConfig(**given))
    return message
