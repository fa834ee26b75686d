"""Weights are read from safetensors into their places, whatever their dtype there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.files import hub_files
from tinsmith_engine.files.hub_files import read_parameters, stored_tensors
from tinsmith_runtime.errors import CheckpointIncompatibleError, FileRefusedError

LAYOUT = ParameterLayout([("a", (3, 5)), ("b", (7,))])
CPU = torch.device("cpu")


def stored(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "b": torch.randn(7, generator=generator).to(dtype),
        "a": torch.randn(3, 5, generator=generator).to(dtype),
        "unused": torch.zeros(2, dtype=dtype),
    }
    save_file(tensors, directory / "model.safetensors")
    return tensors


@pytest.mark.parametrize("stored_as", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [4, 1 << 20], ids=["in-pieces", "at-once"])
def test_numbers_are_converted_as_torch_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored_as: torch.dtype,
    wanted: torch.dtype,
    piece: int,
) -> None:
    monkeypatch.setattr(hub_files, "_CHUNK_NUMBERS", piece)
    tensors = stored(tmp_path, stored_as)
    row = read_parameters(tmp_path, LAYOUT, wanted, CPU)
    for name in ("a", "b"):
        assert torch.equal(LAYOUT.view(row, name), tensors[name].to(wanted))
    assert not row[LAYOUT.num_numbers :].any()


def test_a_dtype_that_is_none_of_weights_is_named(tmp_path: Path) -> None:
    stored(tmp_path, torch.int32)
    with pytest.raises(CheckpointIncompatibleError, match="dtype I32; convert them to one of F64"):
        read_parameters(tmp_path, LAYOUT, torch.float32, CPU)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, torch.float32)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FileRefusedError, match="bytes of numbers, its header describes"):
        read_parameters(tmp_path, LAYOUT, torch.float32, CPU)


def test_an_index_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, torch.float32)
    layout = ParameterLayout([("a", (3, 5)), ("c", (7,))])
    index = {"weight_map": dict.fromkeys(("a", "c"), "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointIncompatibleError, match="lacks tensor c"):
        read_parameters(tmp_path, layout, torch.float32, CPU)


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""]
)
def test_an_index_that_points_out_of_its_folder_is_refused(tmp_path: Path, file: str) -> None:
    index = {"weight_map": {"a": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileRefusedError, match="no file beside it"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "[" * 100_000]
)
def test_an_index_without_a_map_of_files_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FileRefusedError, match="copy it again"):
        stored_tensors(tmp_path)
