"""Images in sequences: preparation, gradients, sampling, and bytes that are no images."""

from __future__ import annotations

import dataclasses
import io
import json
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.unit.engine.conftest import (
    IMAGE_TOKEN,
    LORA,
    VOCAB,
    gradients,
    make_batch,
    randomise_b,
    reference_loss,
    relative_error,
    save_tiny_vision,
)

from tinsmith.v1 import trajectories_pb2
from tinsmith_engine import (
    BatchResult,
    Datum,
    Engine,
    FullConfig,
    LoraConfig,
    Sampler,
    SampleRequest,
)
from tinsmith_engine.base.types import BatchRequest, ImageInput, ImageRules
from tinsmith_engine.contract.codec import decode_input
from tinsmith_engine.packing.images import patches, place_images, rope_positions
from tinsmith_runtime.errors import InvalidFieldError, SequenceTooLongError

TOLERANCE = 3e-6


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(tmp_path_factory.mktemp("vision"))


def encoded(width: int, height: int, seed: int = 0, kind: str = "png", mode: str = "RGB") -> bytes:
    """A random smooth picture."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (5, 7, len(mode)), dtype=np.uint8)
    picture = Image.fromarray(small.squeeze(), mode=None).resize((width, height))
    stream = io.BytesIO()
    picture.save(stream, format=kind)
    return stream.getvalue()


def image(position: int, width: int, height: int, **fields: Any) -> ImageInput:
    return ImageInput(position, encoded(width, height, **fields), fields.get("kind", "png"))


def with_images(images: list[ImageInput], num_text: int, num_tokens: int, seed: int) -> Datum:
    """A random sequence of text around images; `num_tokens` is what both come to."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=num_tokens).astype(np.float32)
    tokens = random.integers(0, VOCAB - 4, num_text)
    targets = random.integers(0, VOCAB - 4, num_tokens)
    return Datum(tokens, targets, {"weights": weights}, images)


def picture_batch() -> list[Datum]:
    """Text, then a picture of 3 x 2 tokens, then text; and two pictures, one first."""
    return [
        with_images([image(4, 60, 80)], 11, 17, seed=1),
        with_images([image(0, 110, 60, seed=2), image(9, 56, 56, seed=3, kind="jpeg")], 14, 26, 2),
    ]


def published(directory: Path) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 12})


RULES = ImageRules(
    token_id=IMAGE_TOKEN,
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 12,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)


@pytest.mark.parametrize(
    ("width", "height", "mode", "kind"),
    [
        pytest.param(60, 80, "RGB", "png", id="near"),
        pytest.param(9, 11, "RGB", "png", id="scaled-up"),
        pytest.param(500, 301, "RGB", "jpeg", id="scaled-down"),
        pytest.param(40, 200, "L", "png", id="grey"),
        pytest.param(64, 64, "RGBA", "png", id="transparent"),
    ],
)
def test_patches_equal_the_published_processor(
    engine: Engine, tmp_path: Path, width: int, height: int, mode: str, kind: str
) -> None:
    data = encoded(width, height, mode=mode, kind=kind)
    wanted = published(tmp_path)(Image.open(io.BytesIO(data)), return_tensors="np")
    info = dataclasses.replace(engine.info, images=RULES)
    one = ImageInput(1, data, kind)
    tokens_T, (placed,) = place_images(np.array([5, 6]), [one], info, "prompt")
    grid = wanted["image_grid_thw"][0]
    assert [1, *(2 * side for side in placed.grid)] == grid.tolist()
    assert tokens_T.tolist() == [5, *[IMAGE_TOKEN] * placed.num_tokens, 6]
    found = patches(placed, RULES)
    assert found.dtype == np.float32
    assert np.array_equal(found, wanted["pixel_values"])


def reference_model(vision_dir: Path, engine: Engine, run: str, adapter_dir: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    tensors, config = engine.adapter_tensors(run)
    adapter_dir.mkdir()
    save_file(tensors, adapter_dir / "adapter_model.safetensors")
    (adapter_dir / "adapter_config.json").write_text(json.dumps(config))
    base = AutoModelForImageTextToText.from_pretrained(vision_dir, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(base, adapter_dir, is_trainable=True).eval()


def model_inputs(datum: Datum, engine: Engine) -> dict[str, torch.Tensor]:
    """What the transformers model takes for a datum; its own code finds the positions."""
    assert engine.info.images is not None
    tokens_T, placed = place_images(datum.tokens_T, datum.images, engine.info, "prompt")
    tokens = torch.from_numpy(tokens_T)[None]
    if not placed:
        return {"input_ids": tokens}
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).int(),
        "pixel_values": torch.from_numpy(
            np.concatenate([patches(one, engine.info.images) for one in placed])
        ),
        "image_grid_thw": torch.tensor([[1, *(2 * side for side in one.grid)] for one in placed]),
    }


def logprobs_of(model: Any, datum: Datum, engine: Engine) -> torch.Tensor:
    logits = model(**model_inputs(datum, engine)).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.from_numpy(datum.targets_T)[:, None])[:, 0]


def test_logprobs_and_gradients_equal_peft(vision_dir: Path, tmp_path: Path) -> None:
    engine = Engine.load(vision_dir)
    assert (engine.info.exactness, engine.info.reads_images) == ("exact", True)
    engine.create_run("run", LORA)
    randomise_b(engine, "run")
    batch = [*picture_batch(), *make_batch(lengths=(9, 30))]
    model = reference_model(vision_dir, engine, "run", tmp_path / "adapter")
    wanted = [logprobs_of(model, datum, engine) for datum in batch]
    losses = [reference_loss("cross_entropy", lp, d) for lp, d in zip(wanted, batch, strict=True)]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    engine.forward_backward("run", batch, "cross_entropy", {})
    ours = gradients(engine, "run")
    references = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert ours.keys() == references.keys()
    assert not any("visual" in name for name in ours)
    for name, reference in references.items():
        assert relative_error(ours[name], reference) <= TOLERANCE, name
    scored = engine.forward("run", batch, "cross_entropy", {})
    for found, reference in zip(scored.logprobs, wanted, strict=True):
        assert relative_error(torch.from_numpy(found), reference.detach()) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_neighbours_change_no_bit(vision_dir: Path, dtype: str) -> None:
    engine = Engine.load(vision_dir, dtype=dtype)
    batches = {"pictures": picture_batch(), "text": make_batch(), "both": picture_batch()[1:]}
    batches["both"] += make_batch(lengths=(12,))
    requests = []
    for index, (run, batch) in enumerate(batches.items()):
        engine.create_run(run, LoraConfig(rank=8, seed=index))
        randomise_b(engine, run, seed=index)
        requests.append(
            BatchRequest(
                run=run, batch=batch, loss="cross_entropy", loss_config={}, is_backward=True
            )
        )
    alone = [bits(engine, [one])[0] for one in requests]
    assert bits(engine, requests) == alone
    assert bits(engine, requests[::-1])[::-1] == alone


def bits(engine: Engine, requests: list[BatchRequest]) -> list[bytes]:
    found = []
    for one, result in zip(requests, engine.compute(requests), strict=True):
        assert isinstance(result, BatchResult)
        gradient = engine.export_state(str(one.run)).tensors["grad"]
        engine.clear_gradient(str(one.run))
        scores = b"".join(logprobs.tobytes() for logprobs in result.logprobs)
        found.append(scores + gradient.numpy().tobytes())
    return found


def test_positions_of_text_alone_are_plain(vision_dir: Path) -> None:
    assert np.array_equal(rope_positions(5, ()), np.tile(np.arange(5), (3, 1)))
    model: Any = Engine.load(vision_dir).model
    plain = torch.arange(70)
    for left, right in zip(model.rotary(plain), model.rotary(plain.expand(3, -1)), strict=True):
        assert torch.equal(left, right)


def run_all(engine: Engine, *requests: SampleRequest) -> list[list[Any]]:
    sampler = Sampler(engine)
    ids = [sampler.add(one) for one in requests]
    finished = []
    while sampler.has_work:
        finished += sampler.step()
    finished.sort(key=lambda one: (one.request_id, one.sample_index))
    return [[one for one in finished if one.request_id == wanted] for wanted in ids]


def test_greedy_samples_equal_hugging_face(vision_dir: Path) -> None:
    from transformers import AutoModelForImageTextToText

    engine = Engine.load(vision_dir)
    datum = picture_batch()[1]
    model: Any = AutoModelForImageTextToText.from_pretrained(vision_dir, dtype=torch.float32)
    inputs = model_inputs(datum, engine)
    wanted = model.eval().generate(**inputs, do_sample=False, max_new_tokens=15, pad_token_id=0)[
        0, inputs["input_ids"].shape[1] :
    ]
    prompt = SampleRequest(
        prompt_tokens=datum.tokens_T.tolist(),
        images=datum.images,
        max_tokens=15,
        temperature=0.0,
        num_samples=2,
    )
    text = SampleRequest(prompt_tokens=[1, 2, 3], max_tokens=15, seed=4)
    alone = run_all(engine, prompt)[0]
    assert alone[0].tokens == alone[1].tokens == wanted.tolist()
    together = run_all(engine, text, prompt)[1]
    assert together[0].logprobs.tobytes() == alone[0].logprobs.tobytes()
    # The trainer's forward scores what was sampled as the sampler did.
    tokens = np.array([*datum.tokens_T, *alone[0].tokens])
    num_tokens = len(tokens) + 12
    targets = np.full(num_tokens, 1)
    targets[-15:] = tokens[-15:]
    weights = np.ones(num_tokens, np.float32)
    scored = engine.forward(
        None,
        [Datum(tokens, np.append(targets[1:], 1), {"weights": weights}, datum.images)],
        "cross_entropy",
        {},
    ).logprobs[0]
    np.testing.assert_allclose(scored[-16:-1], alone[0].logprobs, atol=1e-5)


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of one's own making: header and given chunks."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, body in ((b"IHDR", header), *chunks, (b"IEND", b"")):
        checksum = zlib.crc32(kind + body)
        parts.append(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum))
    return b"".join(parts)


GOOD = encoded(60, 80)


@pytest.mark.parametrize(
    ("data", "kind", "problem"),
    [
        pytest.param(b"", "png", "cannot be read", id="empty"),
        pytest.param(b"not an image", "png", "cannot be read", id="noise"),
        pytest.param(GOOD[:-40], "png", "cannot be read", id="truncated"),
        pytest.param(GOOD[:100] + b"\0" * 50 + GOOD[150:], "png", "cannot be read", id="damaged"),
        pytest.param(encoded(60, 80, kind="jpeg")[:300], "jpeg", "cannot be read", id="half-jpeg"),
        pytest.param(GOOD, "jpeg", "cannot be read", id="not-what-it-says"),
        pytest.param(encoded(60, 80, kind="gif"), "gif", "format 'gif'", id="unknown-format"),
        pytest.param(encoded(60, 80, kind="gif"), "png", "cannot be read", id="hidden-format"),
        pytest.param(GOOD, "", "format ''", id="no-format"),
        pytest.param(png(60_000, 60_000), "png", "read", id="bomb"),
        pytest.param(png(8_000, 8_000), "png", "pixels", id="large"),
        pytest.param(png(4_000, 4), "png", "one side over", id="ribbon"),
        pytest.param(png(0, 5), "png", "read", id="no-width"),
        pytest.param(png(64, 64, (b"IDAT", zlib.compress(b"\0"))), "png", "read", id="short-data"),
        pytest.param(
            png(64, 64, (b"zTXt", b"a\0\0" + zlib.compress(b"\0" * (80 << 20)))),
            "png",
            "read",
            id="text-bomb",
        ),
        pytest.param(b"\0" * ((20 << 20) + 1), "png", "bytes", id="too-many-bytes"),
    ],
)
def test_what_is_no_image_is_refused_by_name(
    vision_dir: Path, data: bytes, kind: str, problem: str
) -> None:
    info = shared_engine(vision_dir).info
    with pytest.raises(InvalidFieldError, match=problem) as caught:
        place_images(
            np.arange(3), [ImageInput(1, data, kind, "data[3].chunks[1]")], info, "data[3]"
        )
    assert caught.value.metadata["field"] == "data[3].chunks[1]"


_ENGINES: dict[Path, Engine] = {}


def shared_engine(vision_dir: Path) -> Engine:
    if vision_dir not in _ENGINES:
        _ENGINES[vision_dir] = Engine.load(vision_dir)
    return _ENGINES[vision_dir]


def test_random_damage_never_escapes(vision_dir: Path) -> None:
    info = shared_engine(vision_dir).info
    random = np.random.default_rng(0)
    sources = {"png": GOOD, "jpeg": encoded(60, 80, kind="jpeg")}
    refused = 0
    for number in range(200):
        kind = ("png", "jpeg")[number % 2]
        data = bytearray(sources[kind])
        for place in random.integers(8, len(data), random.integers(1, 6)):
            data[place] = random.integers(0, 256)
        try:
            place_images(np.arange(3), [ImageInput(1, bytes(data), kind)], info, "prompt")
        except (InvalidFieldError, SequenceTooLongError):
            refused += 1
    assert refused > 50


def test_a_broken_image_fails_its_own_request_alone(vision_dir: Path) -> None:
    engine = shared_engine(vision_dir)
    broken = with_images([ImageInput(1, GOOD[:-40], "png")], 5, 11, seed=1)
    requests = [
        BatchRequest(run=None, batch=batch, loss="cross_entropy", loss_config={}, is_backward=False)
        for batch in (make_batch(), [broken], picture_batch())
    ]
    first, second, third = engine.compute(requests)
    assert isinstance(first, BatchResult)
    assert isinstance(second, InvalidFieldError)
    assert isinstance(third, BatchResult)


def test_placeholders_count_toward_the_context(vision_dir: Path) -> None:
    engine = Engine.load(vision_dir, max_sequence_tokens=16)
    with pytest.raises(SequenceTooLongError, match="17 tokens"):
        engine.forward(None, picture_batch()[:1], "cross_entropy", {})
    with pytest.raises(SequenceTooLongError):
        Sampler(engine).add(
            SampleRequest(prompt_tokens=[1] * 11, max_tokens=1, images=[image(4, 60, 80)])
        )


def test_models_of_text_refuse_images_and_vision_models_full_training(
    engine: Engine, vision_dir: Path
) -> None:
    assert not engine.info.reads_images
    with pytest.raises(InvalidFieldError, match="reads no images"):
        engine.forward(None, picture_batch(), "cross_entropy", {})
    with pytest.raises(InvalidFieldError, match="frozen"):
        shared_engine(vision_dir).create_run("full", FullConfig())


def test_chunks_keep_their_places() -> None:
    from tinsmith.tensors import encode_tokens

    message = trajectories_pb2.ModelInput()
    message.chunks.add(tokens=encode_tokens([1, 2]))
    message.chunks.add(image=trajectories_pb2.ImageChunk(data=GOOD, format="png"))
    message.chunks.add(tokens=encode_tokens([3]))
    tokens_T, images = decode_input(message, field="prompt")
    assert tokens_T.tolist() == [1, 2, 3]
    assert [(one.position, one.format, one.field) for one in images] == [
        (2, "png", "prompt.chunks[1]")
    ]
