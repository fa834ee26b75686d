"""From a model directory to a sharded module, without the whole model on any rank.

The module is built without memory for its parameters, sharded, and then each rank reads its own
parts of them from the safetensors files. transformers converts some architectures while it
loads, so that names of files differ from those of the module. It then loads the whole model on
the host of each rank first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from tinsmith_engine.files.hub_files import load_hf_config, stored_tensors
from tinsmith_runtime.errors import ModelNotFoundError


def load_sharded(
    directory: Path, shard: Callable[[nn.Module], None], device: torch.device
) -> nn.Module:
    """Return a float32 causal language model; all ranks call this together.

    Args:
        directory: Of the model.
        shard: Shards a module in place, which may have no memory yet.
        device: Where the parts go.

    Raises:
        ModelNotFoundError: transformers cannot build a causal language model from the directory.
    """
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    try:
        with _quiet(), _without_parameters():
            module = factory.from_config(load_hf_config(directory), dtype=torch.float32)
        module.tie_weights()
        names = {name for name, _ in module.named_parameters()}
        if names <= set(stored_tensors(directory)):
            _fill(module.eval(), directory, shard, device)
        else:
            with _quiet():
                module = factory.from_pretrained(
                    directory, dtype=torch.float32, use_safetensors=True
                ).eval()
            shard(module)
            module.to(device)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ModelNotFoundError(
            f"transformers cannot load a causal language model from {directory}: {error}",
            model=directory,
        ) from error
    found: nn.Module = module
    return found


def _fill(
    module: nn.Module, directory: Path, shard: Callable[[nn.Module], None], device: torch.device
) -> None:
    shard(module)
    # Buffers, such as rotary frequencies, are in no file; they were computed by the constructor.
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    parameters: dict[str, Any] = {name: one.detach() for name, one in module.named_parameters()}
    with _quiet():
        load(parameters, storage_reader=HuggingFaceStorageReader(str(directory)))


@contextmanager
def _without_parameters() -> Iterator[None]:
    """Give parameters of modules that are built meanwhile a shape only."""
    register = nn.Module.register_parameter

    def register_shape(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_shape  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Deprecations inside an architecture's own code are not the caller's business.
        warnings.simplefilter("ignore")
        yield
