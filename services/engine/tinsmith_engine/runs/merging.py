"""A run as a whole model in Hugging Face layout: base model and adapter become one set of weights.

Works on files: tensors of the base model are read one at a time, changed where the adapter has
matrices for them, and written in shards. Memory holds one shard. The sum `W + scale * B A` is taken
in float32 and rounded once, to the dtype that the base model's files have. A head that is tied to
the embedding and has an adapter becomes a tensor of its own.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinsmith_engine.arena.adapter_targets import TargetSpec
from tinsmith_engine.base.types import AdapterConfig, LoraConfig
from tinsmith_engine.files.base_copies import holds_another_head
from tinsmith_engine.files.hub_files import load_hf_config, stored_tensors
from tinsmith_engine.files.weight_files import (
    ITEM_BYTES,
    MODEL_FILE,
    MODEL_INDEX_FILE,
    TensorEntry,
    read_header_of,
)
from tinsmith_engine.model.decoder_config import decoder_config, fused_experts, stored_names
from tinsmith_engine.runs.peft_import import PEFT_PREFIX
from tinsmith_engine.runs.run_store import adapter_scale
from tinsmith_runtime.errors import CheckpointIncompatibleError
from tinsmith_runtime.text.tokenizer_files import (
    NAMED_TEMPLATES_FOLDER,
    TEMPLATE_FILES,
    TOKENIZER_CONFIG_FILE,
    read_chat_template,
    read_stop_token_ids,
)

_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_GENERATION_FILE = "generation_config.json"
_HEAD = "lm_head"
_HEAD_WEIGHT = f"{_HEAD}.weight"


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the merged model, and what it is made of.

    Attributes:
        path: The file that holds it.
        stored_as: Its name there.
        entry: Its dtype and shape in the result.
        modules: What is added to it: the first of its rows (of all leading axes as one) and the
            module whose adapter it is.
    """

    path: Path
    stored_as: str
    entry: TensorEntry
    modules: tuple[tuple[int, str], ...] = ()

    @property
    def size_bytes(self) -> int:
        return math.prod(self.entry.shape) * ITEM_BYTES[self.entry.dtype]


@dataclass(slots=True)
class _Shard:
    names: list[str] = field(default_factory=list)
    size_bytes: int = 0


class MergedModel:
    """The files of a merged model, planned from headers alone.

    Args:
        directory: Of the base model.
        weights: The weights of the checkpoint: `adapter_model.safetensors` of an adapter,
            `model.safetensors` of a full-parameter run.
        config: What the checkpoint's run trained.
        targets: The modules of the base model that take adapters.
        max_shard_bytes: Size at which another file is begun.

    Raises:
        CheckpointIncompatibleError: If a matrix of the adapter has no place in the base model's
            files.
    """

    def __init__(
        self,
        directory: Path,
        weights: Path,
        config: AdapterConfig,
        specs: Sequence[TargetSpec],
        *,
        max_shard_bytes: int,
    ) -> None:
        self._directory = directory
        self._weights = weights
        self._config = config
        base = {name: (path, entry) for name, path, entry in _base_tensors(directory)}
        self._unties = False
        if isinstance(config, LoraConfig):
            self._sources = self._plan_adapter(base, config, specs)
        else:
            self._sources = self._plan_full(base)
        self._shards = _plan_shards(self._sources, max_shard_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(source.size_bytes for source in self._sources.values())

    @property
    def files(self) -> list[str]:
        """Names of the weight files."""
        if len(self._shards) == 1:
            return [MODEL_FILE]
        count = len(self._shards)
        return [f"model-{index + 1:05}-of-{count:05}.safetensors" for index in range(count)]

    def write(self, folder: Path, on_file: Callable[[Path], None]) -> None:
        """Write all files, one after the other; each is the caller's once `on_file` is called."""
        for path in self._write_companions(folder):
            on_file(path)
        for name, shard in zip(self.files, self._shards, strict=True):
            path = folder / name
            self._write_shard(path, shard)
            on_file(path)
        if len(self._shards) > 1:
            index = {
                "metadata": {"total_size": self.size_bytes},
                "weight_map": {
                    tensor: name
                    for name, shard in zip(self.files, self._shards, strict=True)
                    for tensor in shard.names
                },
            }
            path = folder / MODEL_INDEX_FILE
            path.write_text(json.dumps(index, indent=1, sort_keys=True))
            on_file(path)

    def _plan_adapter(
        self,
        base: Mapping[str, tuple[Path, TensorEntry]],
        config: LoraConfig,
        specs: Sequence[TargetSpec],
    ) -> dict[str, _Source]:
        hf_config = load_hf_config(self._directory)
        decoder = decoder_config(hf_config)
        names: Mapping[str, str] = {name: name for name in base}
        fused: Mapping[str, Sequence[str]] = {}
        if decoder is not None:
            names, fused = stored_names(decoder, base.keys()), fused_experts(decoder)
        num_rows = {
            f"{name}.weight": size
            for spec in specs
            for name, size in zip(spec.names, spec.num_outputs, strict=True)
        }
        part_of = {
            part: (whole, sum(num_rows[before] for before in parts[:index]))
            for whole, parts in fused.items()
            if whole in names
            for index, part in enumerate(parts)
        }
        modules: dict[str, list[tuple[int, str]]] = {}
        is_tied = bool(getattr(hf_config.get_text_config(), "tie_word_embeddings", False))
        if is_tied and holds_another_head(self._directory):
            is_tied, self._unties = False, True
        sources: dict[str, _Source] = {}
        for spec in specs:
            for name in spec.names if spec.is_adapted_by(config) else ():
                weight = f"{name}.weight"
                if name == _HEAD and is_tied:
                    sources[_HEAD_WEIGHT] = self._untied_head(base, names)
                elif weight in names:
                    modules.setdefault(names[weight], []).append((0, name))
                elif weight in part_of:
                    whole, row = part_of[weight]
                    modules.setdefault(names[whole], []).append((row, name))
                else:
                    raise CheckpointIncompatibleError(
                        f"{self._directory.name} stores no tensor {weight}, so the adapter of "
                        f"{name} cannot be merged into it; export the adapter as PEFT",
                        tensor=weight,
                    )
        for name, (path, entry) in base.items():
            if name not in sources:
                sources[name] = _Source(path, name, entry, tuple(modules.get(name, ())))
        return sources

    def _untied_head(
        self, base: Mapping[str, tuple[Path, TensorEntry]], names: Mapping[str, str]
    ) -> _Source:
        """Return the unembedding of a model that shares it with the embedding until now."""
        self._unties = True
        embedding = next(
            (names[name] for name in names if name.endswith(".embed_tokens.weight")), None
        )
        if embedding is None:
            raise CheckpointIncompatibleError(
                f"{self._directory.name} stores no embedding to make the unembedding of; "
                "export the adapter as PEFT",
                tensor=_HEAD_WEIGHT,
            )
        path, entry = base[embedding]
        return _Source(path, embedding, entry, ((0, _HEAD),))

    def _plan_full(self, base: Mapping[str, tuple[Path, TensorEntry]]) -> dict[str, _Source]:
        """Return the run's own tensors, each in the dtype that the base model has it in."""
        usual = next((entry.dtype for _, entry in base.values()), "F32")
        sources = {}
        run = read_header_of(self._weights)
        # A run of a model whose files hold another head than its settings say has both as well.
        self._unties = _HEAD_WEIGHT in run
        for name, entry in run.items():
            dtype = base[name][1].dtype if name in base else usual
            wanted = TensorEntry(dtype, entry.shape, entry.begin, entry.end)
            sources[name] = _Source(self._weights, name, wanted)
        return sources

    def _write_companions(self, folder: Path) -> Iterator[Path]:
        """Write configuration, generation settings and tokenizer."""
        template_files, config_template = _templates(self._directory, self._config.chat_template)
        for source in sorted(self._directory.iterdir()):
            is_index = source.name.endswith(".index.json")
            is_hidden = source.name.startswith(".")
            if is_index or is_hidden or not source.name.endswith(_COMPANION_SUFFIXES):
                continue
            if source.name == _GENERATION_FILE or source.name in template_files:
                continue
            target = folder / source.name
            if source.name == "config.json" and self._unties:
                target.write_text(json.dumps(_untied(json.loads(source.read_text())), indent=2))
            elif source.name == TOKENIZER_CONFIG_FILE and config_template is not None:
                settings = json.loads(source.read_text(encoding="utf-8"))
                settings["chat_template"] = config_template
                target.write_text(json.dumps(settings, indent=2, ensure_ascii=False))
            else:
                shutil.copyfile(source, target)
            yield target
        settings = _generation_settings(self._directory, self._config.stop_token_ids)
        if settings:
            target = folder / _GENERATION_FILE
            target.write_text(json.dumps(settings, indent=2))
            yield target

    def _write_shard(self, path: Path, shard: _Shard) -> None:
        tensors: dict[str, Tensor] = {}
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}

            def file_of(source: Path) -> Any:
                if source not in opened:
                    opened[source] = stack.enter_context(safe_open(source, framework="pt"))
                return opened[source]

            for name in shard.names:
                source = self._sources[name]
                tensor = file_of(source.path).get_tensor(source.stored_as)
                dtype = _TORCH_DTYPES.get(source.entry.dtype, tensor.dtype)
                if source.modules:
                    tensor = self._merged(tensor, source, file_of(self._weights))
                tensors[name] = tensor.to(dtype).contiguous()
        save_file(tensors, path, {"format": "pt"})

    def _merged(self, tensor: Tensor, source: _Source, adapter: Any) -> Tensor:
        """Return a tensor with the products of its adapters added, float32."""
        total = tensor.to(torch.float32)
        if total.data_ptr() == tensor.data_ptr():
            total = total.clone()
        rows = total.flatten(0, -2)
        scale = adapter_scale(self._config)
        for first, module in source.modules:
            a = adapter.get_tensor(f"{PEFT_PREFIX}{module}.lora_A.weight").to(torch.float32)
            b = adapter.get_tensor(f"{PEFT_PREFIX}{module}.lora_B.weight").to(torch.float32)
            if first + len(b) > len(rows) or a.shape[1] != rows.shape[1]:
                raise CheckpointIncompatibleError(
                    f"tensor {source.stored_as} of the base model has shape {list(tensor.shape)}, "
                    f"into which the adapter of {module} does not fit",
                    tensor=source.stored_as,
                )
            rows[first : first + len(b)].addmm_(b, a, alpha=scale)
        return total


_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def _base_tensors(directory: Path) -> Iterator[tuple[str, Path, TensorEntry]]:
    """Yield the tensors of a model directory, file by file, in the order of each file."""
    wanted = stored_tensors(directory)
    for path in sorted(set(wanted.values())):
        for name, entry in read_header_of(path).items():
            if wanted.get(name) == path:
                yield name, path, entry


def _plan_shards(sources: Mapping[str, _Source], max_shard_bytes: int) -> list[_Shard]:
    shards = [_Shard()]
    for name, source in sources.items():
        if shards[-1].names and shards[-1].size_bytes + source.size_bytes > max_shard_bytes:
            shards.append(_Shard())
        shards[-1].names.append(name)
        shards[-1].size_bytes += source.size_bytes
    return shards


def _templates(directory: Path, own: str) -> tuple[tuple[str, ...], Any]:
    """Return the template files that are left out, and what stands in the settings instead.

    Exports have no folders, so that templates with names stand beside the default one in the
    tokenizer's settings, where transformers reads them as well. A run's `own` is the only one.
    """
    if own:
        return TEMPLATE_FILES, own
    named = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((directory / NAMED_TEMPLATES_FOLDER).glob("*.jinja"))
    }
    if not named:
        return (), None
    default = read_chat_template(directory)
    templates = {**({} if default is None else {"default": default}), **named}
    return TEMPLATE_FILES, [
        {"name": name, "template": source} for name, source in templates.items()
    ]


def _generation_settings(directory: Path, further: Sequence[int]) -> dict[str, Any]:
    """Return the generation settings of a model, in which the end of its template's turn ends.

    `further` are the ends of the run's own template.
    """
    source = directory / _GENERATION_FILE
    settings: dict[str, Any] = json.loads(source.read_text()) if source.is_file() else {}
    ends = list(dict.fromkeys([*read_stop_token_ids(directory), *further]))
    if ends:
        settings["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return settings


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose unembedding is a tensor of its own."""
    changed = {**config, "tie_word_embeddings": False}
    if isinstance(config.get("text_config"), dict):
        changed["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return changed
