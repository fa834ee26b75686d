"""Teaches a model the teacher's likeliest tokens at each place of the conversations of a file."""

import asyncio

import chz
from tinker_cookbook import model_info
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


def main(model_name: str, teacher_path: str, file_path: str, log_path: str) -> None:
    """Train on eight conversations a step, against a checkpoint of another training."""
    renderer_name = model_info.get_recommended_renderer_name(model_name)
    dataset = FromConversationFileBuilder(
        file_path=file_path,
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=model_name,
            renderer_name=renderer_name,
            max_length=128,
            batch_size=8,
        ),
    )
    config = train_off_policy.Config(
        log_path=log_path,
        model_name=model_name,
        recipe_name="distill_off_policy",
        renderer_name=renderer_name,
        dataset_configs=[
            train_off_policy.DatasetWithTeacher(
                dataset_builder=dataset,
                teacher_config=TeacherConfig(
                    base_model=model_name, load_checkpoint_path=teacher_path
                ),
            )
        ],
        n_teacher_targets=4,
        batch_size=8,
        learning_rate=1e-2,
        save_every=0,
    )
    asyncio.run(train_off_policy.main(config))


if __name__ == "__main__":
    chz.entrypoint(main)
