"""Teaches a model the conversations of a file, with an evaluation and checkpoints on the way."""

import asyncio

import chz
import tinker
from tinker_cookbook import model_info
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


class Outage(TrainingClientEvaluator):
    """Ends the program at its second evaluation, as a power cut would."""

    def __init__(self) -> None:
        self._num_calls = 0

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        self._num_calls += 1
        if self._num_calls == 2:
            raise SystemExit("the lights went out")
        return {}


def main(model_name: str, file_path: str, log_path: str, outage: bool = False) -> None:
    """Train for 40 steps, or until the outage."""
    renderer_name = model_info.get_recommended_renderer_name(model_name)
    dataset = FromConversationFileBuilder(
        file_path=file_path,
        test_size=8,
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=model_name,
            renderer_name=renderer_name,
            max_length=128,
            batch_size=8,
        ),
    )
    config = train.Config(
        log_path=log_path,
        model_name=model_name,
        recipe_name="supervised",
        renderer_name=renderer_name,
        dataset_builder=dataset,
        evaluator_builders=[Outage] if outage else [],
        learning_rate=1e-2,
        num_epochs=10,
        save_every=5,
        eval_every=12,
    )
    asyncio.run(train.main(config))


if __name__ == "__main__":
    chz.entrypoint(main)
