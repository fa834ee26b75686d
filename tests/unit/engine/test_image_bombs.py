"""Small files that decode to large pictures: counted over a request, from their headers alone."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.unit.engine.conftest import save_tiny_vision

from tinsmith import images
from tinsmith_engine import Datum, Engine
from tinsmith_engine.base.types import ImageInput
from tinsmith_engine.packing.images import place_images
from tinsmith_engine.training.batch_validation import validate_batch
from tinsmith_runtime.errors import InvalidFieldError

_SIDE = 5600
_TOO_MANY = images.MAX_PROMPT_PIXELS // _SIDE**2 + 1


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """The beginning of 31 million pixels: its header can be read, and nothing can be decoded."""
    stream = io.BytesIO()
    Image.new("L", (_SIDE, _SIDE)).save(stream, format="png")
    assert len(stream.getvalue()) < 64 * 1024
    return stream.getvalue()[:1024]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory: Path = save_tiny_vision(tmp_path_factory.mktemp("vision"))
    return Engine.load(directory, max_resident_runs=1)


def test_pixels_of_a_prompt_are_counted(engine: Engine, bomb: bytes) -> None:
    inputs = [ImageInput(0, bomb, "png", f"chunks[{index}]") for index in range(_TOO_MANY)]
    with pytest.raises(InvalidFieldError, match="pixels together"):
        place_images(np.array([1], dtype=np.int64), inputs, engine.info, "prompt")


def test_pixels_of_a_batch_are_counted_over_its_datums(engine: Engine, bomb: bytes) -> None:
    tokens = np.array([1, 2], dtype=np.int64)
    datum = Datum(
        tokens,
        tokens,
        {"weights": np.ones(2, dtype=np.float32)},
        (ImageInput(0, bomb, "png", "chunks[0]"),),
    )
    with pytest.raises(InvalidFieldError, match="pixels together"):
        validate_batch([datum] * _TOO_MANY, "cross_entropy", {}, engine.info)
