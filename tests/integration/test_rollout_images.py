"""Episodes with images and tools on a real server: what was sampled is trained on exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.chat_models import IMAGE, QWEN3_VL, chat_tokenizer, tokenizer_files
from tests.integration.servers import BASE_MODEL, Deployment, embedded_server
from tests.unit.engine.conftest import save_tiny_vision

import tinsmith
from tinsmith.environments.environment import Action
from tinsmith.rollouts import GroupConfig, RolloutConfig, RolloutRunner, run_groups
from tinsmith.rollouts.adapters import ServiceInstance, ServiceSampler, create_service_instance
from tinsmith.rollouts.play_calls import Place
from tinsmith.text.tool_notations import ToolCall
from tinsmith.types import SamplingParams

CLIENT: Place = "client"
SERVER: Place = "server"
ENVIRONMENT = "tests.fakes.picture_environment:PictureEnvironment"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    tokenizer = chat_tokenizer(QWEN3_VL)
    token = tokenizer.token_to_id(IMAGE)
    assert token is not None
    model = save_tiny_vision(
        tmp_path_factory.mktemp("vision"),
        vocab_size=tokenizer.vocab_size + 8,
        image_token=token,
        max_position_embeddings=1024,
    )
    for name, content in tokenizer_files(QWEN3_VL).items():
        (model / name).write_bytes(content)
    overrides: dict[str, dict[str, object]] = {
        "environment": {
            "environments": f"pictures={ENVIRONMENT}",
            "python_path": str(Path(__file__).parents[2]),
            "num_workers": 1,
        }
    }
    with embedded_server(tmp_path_factory.mktemp("seeing"), model, **overrides) as deployment:
        yield deployment


def test_what_was_sampled_behind_images_is_trained_on_to_the_bit(seeing: Deployment) -> None:
    with seeing.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=8, seed=1)
        [model] = client.list_models()
        assert model.images is not None
        runner = RolloutRunner(
            client.get_tokenizer(BASE_MODEL),
            ServiceSampler(run.sampler()),
            RolloutConfig(max_tokens_per_turn=6, max_context_tokens=1024),
            params=SamplingParams(seed=3),
            images=model.images,
        )

        async def create(seed: int) -> ServiceInstance:
            return await create_service_instance(client.environments, "pictures", seed=seed)

        result = asyncio.run(run_groups(runner, [0, 7], create, GroupConfig(group_size=2)))
        assert result.report.num_completed == 4
        for group in result.groups:
            for trajectory in group.trajectories:
                assert len(trajectory.samples[0].images) == 3
                assert len(trajectory.turns) == 2
        arrays = [each for group in result.groups for each in group.arrays()]
        datums = [each.to_datum() for each in arrays]
        outputs = run.forward_backward(datums, "importance_sampling").result().outputs
        for each, output in zip(arrays, outputs, strict=True):
            trained = each.mask > 0
            # Weights with zero advantage are not computed; the loss sees what the sampler saw.
            nonzero = trained & (each.advantages != 0)
            assert np.array_equal(output.logprobs[nonzero], each.logprobs[nonzero])
        assert any((each.advantages != 0).any() for each in arrays)


def test_calls_of_tools_reach_a_served_environment_and_its_answer_comes_back(
    seeing: Deployment,
) -> None:
    with seeing.client() as client:
        instance = client.environments.create_instance("pictures", seed=1)
        assert [tool["function"]["name"] for tool in instance.observation.tools] == ["zoom"]
        assert instance.observation.messages[0]["content"][1] == {"type": "image"}
        assert len(instance.observation.images) == 2
        step = instance.step(Action("look", tool_calls=(ToolCall("zoom", "{}", "c1"),))).result()
        assert step.info == {"calls": 1.0}
        assert step.observation.messages == [
            {"role": "tool", "content": [{"type": "image"}], "tool_call_id": "c1", "name": "zoom"}
        ]
        assert len(step.observation.images) == 1
        wrong = Action("look", tool_calls=(ToolCall("zoom", "[1]"),))
        with pytest.raises(tinsmith.InvalidArgumentError, match="no JSON object"):
            instance.step(wrong).result()


def test_an_image_of_another_size_than_was_counted_is_refused(seeing: Deployment) -> None:
    with seeing.client() as client:
        [model] = client.list_models()
        instance = client.environments.create_instance("pictures", seed=1)
        image = instance.observation.images[1]
        assert model.images is not None
        expected = model.images.num_tokens(image.data, image.format)
        sampler = client.create_sampling_client(base_model=BASE_MODEL)
        for counted, is_refused in ((expected, False), (expected + 1, True)):
            chunk = tinsmith.ImageChunk(image.data, image.format, counted)
            prompt = tinsmith.ModelInput((chunk, tinsmith.EncodedTextChunk((5,))))
            future = sampler.sample(prompt, sampling_params=SamplingParams(max_tokens=1))
            if is_refused:
                with pytest.raises(tinsmith.InvalidArgumentError, match="the image takes"):
                    future.result()
            else:
                assert future.result().sequences[0].tokens


def test_the_server_plays_images_and_tools_to_the_bits_of_the_client(seeing: Deployment) -> None:
    with seeing.client() as client:
        sampler = client.create_sampling_client(base_model=BASE_MODEL)
        here, there = (
            client.environments.play(
                "pictures",
                sampler=sampler,
                seeds=[0, 7],
                config=RolloutConfig(max_tokens_per_turn=6, max_context_tokens=1024),
                params=SamplingParams(seed=3),
                rollouts=place,
            )
            for place in (CLIENT, SERVER)
        )
    for ours, theirs in zip(here.groups, there.groups, strict=True):
        [[mine], [other]] = (group.trajectories[0].samples for group in (ours, theirs))
        assert np.array_equal(mine.tokens, other.tokens)
        assert np.array_equal(mine.logprobs, other.logprobs)
        assert mine.model_input == other.model_input
        assert len(mine.images) == 3
