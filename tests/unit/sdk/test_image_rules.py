"""How many tokens an image takes, by its header, held against Pillow and the engine."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.fakes.pictures import picture

from tinsmith.images import ImageError, ImageRules, image_size
from tinsmith_engine.base.types import ImageInput, ModelInfo
from tinsmith_engine.base.types import ImageRules as EngineRules
from tinsmith_engine.packing.images import place_images

sides = st.integers(1, 400)


@given(width=sides, height=sides, kind=st.sampled_from(("png", "jpeg")), progressive=st.booleans())
def test_the_size_is_that_of_the_decoded_image(
    width: int, height: int, kind: str, progressive: bool
) -> None:
    stream = io.BytesIO()
    options = {"progressive": progressive} if kind == "jpeg" else {}
    comment = {"exif": b"Exif\0\0" + bytes(300)} if kind == "jpeg" else {}
    Image.new("RGB", (width, height)).save(stream, format=kind, **options, **comment)
    assert image_size(stream.getvalue(), kind) == (width, height)


@given(width=st.integers(20, 400), height=st.integers(20, 400))
def test_the_client_counts_the_tokens_that_the_engine_places(width: int, height: int) -> None:
    image = picture(width, height)
    rules = EngineRules(
        token_id=9, patch_size=14, merge_size=2, temporal_patch_size=2,
        min_pixels=56 * 56, max_pixels=28 * 28 * 20, mean=(0.0,) * 3, std=(1.0,) * 3,
    )  # fmt: skip
    info = ModelInfo(
        family="x", vocab_size=10, max_context_tokens=10_000, num_parameters=0, fingerprint="",
        exactness="exact", dtype="float32", images=rules,
    )  # fmt: skip
    client = ImageRules(rules.token_id, rules.token_side_pixels, rules.min_pixels, rules.max_pixels)
    num_tokens = client.num_tokens(image.data, image.format)
    given_image = ImageInput(0, image.data, image.format, "x", expected_tokens=num_tokens)
    tokens_T, _ = place_images(np.zeros(1, dtype=np.int64), [given_image], info, "prompt")
    assert tokens_T.tolist() == [9] * num_tokens + [0]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        pytest.param(b"", "png", id="empty"),
        pytest.param(b"no picture at all, but long enough", "png", id="text"),
        pytest.param(picture(9, 9).data[:18], "png", id="cut-png"),
        pytest.param(picture(9, 9, kind="jpeg").data[:40], "jpeg", id="cut-jpeg"),
        pytest.param(picture(9, 9).data, "jpeg", id="png-as-jpeg"),
        pytest.param(picture(9, 9, kind="jpeg").data, "png", id="jpeg-as-png"),
        pytest.param(picture(9, 9).data, "gif", id="unknown-format"),
        pytest.param(b"\xff\xd8\xff\xda\x00\x02", "jpeg", id="no-frame"),
        pytest.param(b"\xff\xd8\xff\xe0\x00\x00" * 9, "jpeg", id="length-of-nothing"),
        pytest.param(picture(9, 9).data[:16] + bytes(8), "png", id="no-pixels"),
    ],
)
def test_what_is_no_image_is_told(data: bytes, kind: str) -> None:
    with pytest.raises(ImageError):
        image_size(data, kind)


@given(data=st.binary(max_size=200), kind=st.sampled_from(("png", "jpeg")))
def test_any_bytes_end_in_a_size_or_a_typed_error(data: bytes, kind: str) -> None:
    starts = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8"}
    with contextlib.suppress(ImageError):
        assert min(image_size(starts[kind] + data, kind)) > 0
