"""Public data sets as rows: from the hub, from a folder, or from a file.

`hf://NAME` is loaded by Hugging Face's `datasets`, if that is installed (`hub_data`). A folder
holds `train.jsonl`, and `test.jsonl` or `validation.jsonl`; or it was written by `save_to_disk` of
`datasets`. Without a part for validation, every fifth question is held out.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.tasks.arithmetic import MathFormatError, parse_completion
from tinsmith.recipes.tasks.geometry_environment import PictureProblem
from tinsmith.recipes.tasks.hub_data import HELD_OUT_PARTS, HUB, Rows, load_hub, load_saved
from tinsmith.recipes.tasks.jsonl import read_lines
from tinsmith.types import ImageChunk

_HELD_OUT_EVERY = 5
_FORMATS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg"}
_MARK = "<image>"

RowT = TypeVar("RowT")


def hold_out(rows: Sequence[RowT]) -> tuple[list[RowT], list[RowT]]:
    """Return the rows to train on and those held out: the first, and every fifth from there."""
    train = [row for index, row in enumerate(rows) if index % _HELD_OUT_EVERY]
    return train, list(rows[::_HELD_OUT_EVERY])


def is_public(data: str) -> bool:
    """Whether data is a data set of the hub, or a folder."""
    return data.startswith(HUB) or Path(data).is_dir()


def read_rows(data: str) -> Rows:
    """Return the rows to train on, `train`, and those held out, `validation`.

    Raises:
        ConfigurationError: If they cannot be loaded, or there is nothing to train on.
        MathFormatError: If a line of a file is not JSON.
    """
    parts = load_hub(data) if data.startswith(HUB) else _load_path(Path(data))
    train = parts.get("train", ())
    held_out = next((parts[name] for name in HELD_OUT_PARTS if parts.get(name)), None)
    if held_out is None:
        # Slices of `datasets` are no rows.
        train, held_out = hold_out(list(train))
    if not train or not held_out:
        raise ConfigurationError(
            f"{data} has too few rows: {len(train)} to train on, {len(held_out)} held out",
            remedy="give a data set with a part `train` of 2 rows or more",
        )
    return {"train": train, "validation": held_out}


def load_pictures(data: str) -> Mapping[str, Sequence[PictureProblem]] | None:
    """Return the problems of a data set in Geometry3K's layout; None if it shows no pictures.

    A row has `images` (or `image`), `question` (or `problem`) and `answer`. Rows whose answer is no
    number are left out: the reward compares numbers.

    Raises:
        ConfigurationError: If no row has a number for its answer.
    """
    if not (is_public(data) or (Path(data).suffix == ".jsonl" and Path(data).is_file())):
        return None
    rows = read_rows(data)
    if not any(key in rows["train"][0] for key in ("images", "image")):
        return None
    folder = Path(data) if Path(data).is_dir() else Path(data).parent
    problems = {
        part: [
            problem
            for number, row in enumerate(found)
            if (problem := _read_picture(row, folder, f"{data}, {part} {number}")) is not None
        ]
        for part, found in rows.items()
    }
    if not all(problems.values()):
        raise ConfigurationError(
            f"no answer of {data} is a number", remedy="give problems with answers such as 12"
        )
    return problems


def _read_picture(row: Mapping[str, Any], folder: Path, where: str) -> PictureProblem | None:
    images = row.get("images", row.get("image"))
    images = images if isinstance(images, list | tuple) else [images]
    question = row.get("question", row.get("problem"))
    answer = parse_completion(str(row.get("answer", "")))
    if not isinstance(question, str) or images == [None]:
        raise MathFormatError(f"{where}: needs an image and a question")
    if answer is None:
        return None
    chunks = [_read_image(image, folder, where) for image in images]
    return PictureProblem(chunks, question.replace(_MARK, "").strip(), answer)


def _read_image(image: Any, folder: Path, where: str) -> ImageChunk:
    """Return an image: a path, encoded bytes, or one that `datasets` opened."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if hasattr(image, "save"):
        stream = io.BytesIO()
        image.convert("RGB").save(stream, format="PNG")
        image = stream.getvalue()
    elif isinstance(image, str):
        try:
            image = (folder / image).read_bytes()
        except OSError as error:
            raise MathFormatError(f"{where}: {image} cannot be read: {error.strerror}") from error
    if isinstance(image, bytes):
        for magic, kind in _FORMATS.items():
            if image.startswith(magic):
                return ImageChunk(image, kind)
    raise MathFormatError(f"{where}: an image is neither PNG nor JPEG")


def _load_path(path: Path) -> Rows:
    if path.is_file():
        return {"train": _read_file(path)}
    if (path / "dataset_dict.json").is_file():
        return load_saved(path)
    parts = {file.stem: _read_file(file) for file in sorted(path.glob("*.jsonl"))}
    if "train" not in parts:
        raise ConfigurationError(
            f"{path} holds no train.jsonl",
            remedy="give a folder with train.jsonl and test.jsonl, or one of save_to_disk",
        )
    return parts


def _read_file(path: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for line in read_lines(path, MathFormatError):
        if not isinstance(line.value, dict):
            raise MathFormatError(f"{line.where}: expected an object")
        rows.append(line.value)
    return rows
