"""What the base models of a host are, in the words of the contract; made once at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith.v1 import models_pb2, scheduler_pb2
from tinsmith_engine.base.types import ModelInfo
from tinsmith_engine.contract.codec import encode_model
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.text.tokenizer_files import read_stop_token_ids, read_tokenizer


@dataclass(frozen=True, slots=True)
class ModelCatalog:
    """Descriptions and tokenizers of base models, by name."""

    models: Mapping[str, models_pb2.ModelCapabilities]
    tokenizers: Mapping[str, scheduler_pb2.Tokenizer]

    @classmethod
    def of(cls, host: EngineHost) -> ModelCatalog:
        """Describe the models of a host from their engines and directories."""
        infos = {name: engine.info for name, engine in host.engines.items()}
        return cls.describing(infos, host.directories)

    @classmethod
    def describing(
        cls, infos: Mapping[str, ModelInfo], directories: Mapping[str, Path]
    ) -> ModelCatalog:
        """Describe models from what they are and from their directories, both by name."""
        tokenizers = {name: read_tokenizer(directory) for name, directory in directories.items()}
        models = {
            name: encode_model(
                name,
                info,
                tokenizer_digest=tokenizers[name].digest,
                stop_token_ids=read_stop_token_ids(directories[name]),
            )
            for name, info in sorted(infos.items())
        }
        # Pods refuse a model that has none (`require_tokenizers`); other users of a host may not.
        return cls(models, {name: found for name, found in tokenizers.items() if found.digest})

    def select(self, base_model: str) -> list[models_pb2.ModelCapabilities]:
        """Return the description of one model, or of all if the name is empty."""
        return [model for name, model in self.models.items() if base_model in ("", name)]
