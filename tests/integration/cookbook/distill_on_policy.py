"""Brings a model to its teacher by the divergence of what the model itself says."""

import asyncio
from pathlib import Path

import chz
from tinker_cookbook import model_info, renderers
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDataset,
    TeacherConfig,
)
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

NUM_STEPS = 20


@chz.chz
class PromptFileBuilder(RLDatasetBuilder):
    """Reads one prompt a line; each step takes all of them."""

    file_path: str
    model_name: str
    renderer_name: str

    async def __call__(self) -> tuple[PromptOnlyDataset, None]:
        tokenizer = get_tokenizer(self.model_name)
        prompts = Path(self.file_path).read_text().splitlines()
        dataset = PromptOnlyDataset(
            prompts=prompts * NUM_STEPS,
            batch_size=len(prompts),
            group_size=4,
            renderer=renderers.get_renderer(self.renderer_name, tokenizer),
            tokenizer=tokenizer,
        )
        return dataset, None


def main(model_name: str, teacher_path: str, file_path: str, log_path: str) -> None:
    """Train against a checkpoint of another training."""
    renderer_name = model_info.get_recommended_renderer_name(model_name)
    config = train_on_policy.Config(
        log_path=log_path,
        model_name=model_name,
        recipe_name="distill_on_policy",
        renderer_name=renderer_name,
        dataset_configs=[
            DistillationDatasetConfig(
                dataset_builder=PromptFileBuilder(
                    file_path=file_path, model_name=model_name, renderer_name=renderer_name
                ),
                teacher_config=TeacherConfig(
                    base_model=model_name, load_checkpoint_path=teacher_path
                ),
                groups_per_batch=4,
            )
        ],
        learning_rate=1e-2,
        max_tokens=8,
        eval_every=0,
        save_every=0,
    )
    asyncio.run(train_on_policy.main(config))


if __name__ == "__main__":
    chz.entrypoint(main)
