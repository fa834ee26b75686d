"""Images in prompts and batches of the unmodified `tinker` SDK."""

from __future__ import annotations

import gc
import io
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from PIL import Image
from tests.integration.servers import BASE_MODEL, Deployment, embedded_server
from tests.integration.tinker_users import connected
from tests.unit.engine.conftest import save_tiny_vision
from tinker import types
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import tinsmith

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    model = save_tiny_vision(tmp_path_factory.mktemp("vision"))
    words = {f"t{index}": index for index in range(32)}
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(model / "tokenizer.json"))
    with embedded_server(tmp_path_factory.mktemp("seeing"), model) as deployment:
        yield deployment
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def picture(kind: str) -> bytes:
    random = np.random.default_rng(1)
    stream = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (56, 56, 3), dtype=np.uint8)).save(stream, format=kind)
    return stream.getvalue()


def test_a_model_learns_from_an_image_and_samples_after_one(seeing: Deployment) -> None:
    image = picture("png")
    answer = [11, 12, 13]
    with seeing.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=8, seed=1, train_unembed=True)
        native_input = tinsmith.ModelInput(
            chunks=(
                tinsmith.EncodedTextChunk((5, 6)),
                tinsmith.ImageChunk(image, "png"),
                tinsmith.EncodedTextChunk((7, 8, *answer[:-1])),
            )
        )
        length = 2 + 4 + 2 + len(answer) - 1
        inputs = {
            "target_tokens": np.array([0] * (length - len(answer)) + answer),
            "weights": np.array([0.0] * (length - len(answer)) + [1.0] * 3, dtype=np.float32),
        }
        datum = tinsmith.Datum(model_input=native_input, loss_fn_inputs=inputs)
        native = run.forward_backward([datum], "cross_entropy").result().loss
    with connected(seeing) as service:
        model = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result()
        chunks: list[types.ModelInputChunk] = [
            types.EncodedTextChunk(tokens=[5, 6]),
            types.ImageChunk(data=image, format="png", expected_tokens=4),
            types.EncodedTextChunk(tokens=[7, 8, *answer[:-1]]),
        ]
        seen = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
        losses = []
        for _ in range(30):
            gradient = model.forward_backward([seen], "cross_entropy")
            model.optim_step(types.AdamParams(learning_rate=2e-2))
            losses.append(gradient.result().metrics["loss:sum"])
        assert losses[0] == native
        assert losses[-1] < 0.2 * losses[0]
        sampler = model.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput(chunks=[*chunks[:2], types.EncodedTextChunk(tokens=[7, 8])])
        greedy = types.SamplingParams(max_tokens=3, temperature=0, stop=[])
        said = sampler.sample(prompt, num_samples=1, sampling_params=greedy).result()
        assert list(said.sequences[0].tokens) == answer


@pytest.mark.parametrize(
    ("data", "kind"), [(b"no picture", "png"), (picture("jpeg"), "png"), (b"", "jpeg")]
)
def test_what_is_no_image_fails_its_future(seeing: Deployment, data: bytes, kind: str) -> None:
    with connected(seeing) as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
        prompt = types.ModelInput(
            chunks=[
                types.ImageChunk(data=data, format=kind, expected_tokens=4),
                types.EncodedTextChunk(tokens=[5]),
            ]
        )
        with pytest.raises(tinker.RequestFailedError, match="chunks"):
            sampler.sample(
                prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)
            ).result()
