"""Images inside sequences: from encoded bytes to the patches that a vision tower reads.

An image arrives as bytes at a place between tokens. *Placing* it opens it, scales it as the model's
published processor does, and puts the placeholder tokens that it stands for into the sequence. The
bytes are a stranger's: formats are those of a list. Sizes are read from the header and limited
before anything is decoded. A faulty image is the request's fault, by name.

Pillow and numpy only: servicers validate images without torch.
"""

from __future__ import annotations

import dataclasses
import io
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.images import (
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    MAX_PROMPT_PIXELS,
    size_problem,
    token_grid,
)
from tinsmith_engine.base.types import (
    Datum,
    FloatArray,
    ImageInput,
    ImageRules,
    IntArray,
    ModelInfo,
)
from tinsmith_runtime.errors import InvalidFieldError, SequenceTooLongError

FORMATS = {"png": "PNG", "jpeg": "JPEG"}


def check_source_pixels(images: Sequence[ImageInput], field: str) -> None:
    """Refuse more pixels than one request may have; reads headers, and decodes nothing.

    Images that are opened already are left out.

    Raises:
        InvalidFieldError: There are too many, or an image cannot be read.
    """
    num_pixels = 0
    for image in images:
        if image.pixels is not None:
            continue
        width, height = _open(image).size
        num_pixels += width * height
        if num_pixels > MAX_PROMPT_PIXELS:
            raise InvalidFieldError(
                field,
                f"holds images of more than {MAX_PROMPT_PIXELS} pixels together; send smaller "
                "images, or several requests",
            )


def place_datum(datum: Datum, info: ModelInfo, path: str) -> Datum:
    """Return a datum with its images opened and their placeholders among its tokens.

    Raises:
        InvalidFieldError: The model reads no images, or an image cannot be read.
        SequenceTooLongError: The images exceed the context of the model.
    """
    if not datum.images or datum.images[0].pixels is not None:
        return datum
    tokens_T, images = place_images(datum.tokens_T, datum.images, info, f"{path}.model_input")
    return dataclasses.replace(datum, tokens_T=tokens_T, images=images)


def place_images(
    tokens_T: IntArray, images: Sequence[ImageInput], info: ModelInfo, field: str
) -> tuple[IntArray, tuple[ImageInput, ...]]:
    """Return the tokens with placeholders, and the opened images at their places among them.

    Raises:
        InvalidFieldError: The model reads no images, or an image cannot be read.
        SequenceTooLongError: The images exceed the context of the model.
    """
    if not images:
        return tokens_T, ()
    rules = info.images
    if rules is None:
        raise InvalidFieldError(images[0].field, "is an image; the base model reads no images")
    if len(images) > MAX_IMAGES:
        raise InvalidFieldError(field, f"holds {len(images)} images, at most {MAX_IMAGES} may be")
    check_source_pixels(images, field)
    grids = [_token_grid(image, rules) for image in images]
    num_tokens = tokens_T.size + sum(rows * columns for rows, columns in grids)
    if num_tokens > info.max_context_tokens:
        raise SequenceTooLongError(
            f"{field} holds {num_tokens} tokens, those of its images included, over the model's "
            f"limit of {info.max_context_tokens}; send smaller or fewer images",
            field=field,
            num_tokens=num_tokens,
            max_context_tokens=info.max_context_tokens,
        )
    parts: list[IntArray] = []
    placed: list[ImageInput] = []
    taken = added = 0
    for image, grid in zip(images, grids, strict=True):
        if not taken <= image.position <= tokens_T.size:
            raise InvalidFieldError(image.field, f"stands at {image.position}, out of order")
        parts.append(tokens_T[taken : image.position])
        parts.append(np.full(grid[0] * grid[1], rules.token_id, dtype=np.int64))
        placed.append(
            dataclasses.replace(
                image,
                position=image.position + added,
                pixels=_pixels(image, grid, rules),
                grid=grid,
            )
        )
        taken = image.position
        added += grid[0] * grid[1]
    return np.concatenate([*parts, tokens_T[taken:]]), tuple(placed)


def rope_positions(num_tokens: int, images: Sequence[ImageInput]) -> IntArray:
    """Return the three rotary positions of each token, [3, T]: time, row and column.

    Text counts up on all three. The tokens of an image stand at one time, at their rows and
    columns, and what follows goes on behind the larger of its sides.

    Source: Qwen2-VL, arXiv:2409.12191, section 2.1 (M-RoPE).
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    taken = position = 0
    for image in images:
        text = image.position - taken
        positions[:, taken : image.position] = position + np.arange(text)
        position += text
        rows, columns = image.grid
        taken = image.position + image.num_tokens
        place = positions[:, image.position : taken].reshape(3, rows, columns)
        place[0] = position
        place[1] = position + np.arange(rows)[:, None]
        place[2] = position + np.arange(columns)[None]
        positions[:, image.position : taken] = place.reshape(3, -1)
        position += max(rows, columns)
    positions[:, taken:] = position + np.arange(num_tokens - taken)
    return positions


def rope_shift(images: Sequence[ImageInput]) -> int:
    """Return by how much the position behind a sequence differs from its number of tokens."""
    return sum(max(image.grid) - image.num_tokens for image in images)


def patches(image: ImageInput, rules: ImageRules) -> FloatArray:
    """Return the patches of a placed image, float32 [patches, channels * time * side * side].

    Patches that become one token follow each other. A still image is a film of equal frames.
    """
    if image.pixels is None:
        raise ValueError("the image was not placed")
    # As transformers' processor computes it: 1/255 in float64, the rest in float32.
    scaled = (image.pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (np.array(values, dtype=np.float32) for values in (rules.mean, rules.std))
    normed = np.moveaxis((scaled - mean) / std, -1, 0)
    rows, columns = image.grid
    side, merge = rules.patch_size, rules.merge_size
    split = normed.reshape(3, rows, merge, side, columns, merge, side)
    grouped = split.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    frames = np.repeat(grouped, rules.temporal_patch_size, axis=5)
    return frames.reshape(rows * columns * merge * merge, -1)


def read_image_rules(directory: Path, hf_config: Any) -> ImageRules:
    """Return how a model's images are prepared: its preprocessor's settings over the usual ones."""
    vision = hf_config.vision_config
    file = directory / "preprocessor_config.json"
    settings: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    size = settings.get("size") or {}
    return ImageRules(
        token_id=hf_config.image_token_id,
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56,
        max_pixels=settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280,
        mean=tuple(settings.get("image_mean") or (0.48145466, 0.4578275, 0.40821073)),
        std=tuple(settings.get("image_std") or (0.26862954, 0.26130258, 0.27577711)),
    )


def _open(image: ImageInput) -> Any:
    """Return the image, header read and nothing decoded."""
    from PIL import Image

    if image.format not in FORMATS:
        raise InvalidFieldError(
            image.field, f"has format {image.format[:32]!r}, must be one of {', '.join(FORMATS)}"
        )
    if len(image.data) > MAX_IMAGE_BYTES:
        raise InvalidFieldError(
            image.field, f"has {len(image.data)} bytes, at most {MAX_IMAGE_BYTES} may be"
        )
    with _Readable(image):
        opened = Image.open(io.BytesIO(image.data), formats=[FORMATS[image.format]])
    problem = size_problem(*opened.size)
    if problem:
        raise InvalidFieldError(image.field, problem)
    return opened


def _token_grid(image: ImageInput, rules: ImageRules) -> tuple[int, int]:
    """Return the rows and columns of tokens that an image is scaled to."""
    width, height = _open(image).size
    rows, columns = token_grid(
        width,
        height,
        token_side_pixels=rules.token_side_pixels,
        min_pixels=rules.min_pixels,
        max_pixels=rules.max_pixels,
    )
    if image.expected_tokens not in (None, rows * columns):
        raise InvalidFieldError(
            f"{image.field}.expected_tokens",
            f"is {image.expected_tokens}; the image takes {rows * columns} tokens",
        )
    return rows, columns


def _pixels(image: ImageInput, grid: tuple[int, int], rules: ImageRules) -> Any:
    """Return the scaled image, uint8 [height, width, 3]."""
    from PIL import Image

    factor = rules.token_side_pixels
    opened = _open(image)
    with _Readable(image):
        if "A" in opened.getbands() or opened.info.get("transparency") is not None:
            white = Image.new("RGBA", opened.size, (255, 255, 255, 255))
            opened = Image.alpha_composite(white, opened.convert("RGBA"))
        scaled = opened.convert("RGB").resize(
            (grid[1] * factor, grid[0] * factor), resample=Image.Resampling.BICUBIC
        )
    return np.asarray(scaled)


class _Readable:
    """Turns what Pillow raises for broken or hostile bytes into an error of the request."""

    def __init__(self, image: ImageInput) -> None:
        self._image = image

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from PIL import Image

        problems = (
            OSError,
            SyntaxError,
            ValueError,
            EOFError,
            IndexError,
            OverflowError,
            TypeError,
            struct.error,
            zlib.error,
            Image.DecompressionBombError,
            Image.DecompressionBombWarning,
        )
        if isinstance(error, problems):
            raise InvalidFieldError(
                self._image.field, f"cannot be read as {self._image.format}: {error}"
            ) from error
