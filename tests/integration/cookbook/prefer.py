"""Teaches a model which of two answers is preferred, by the comparisons of a file."""

import chz
from tinker_cookbook import model_info
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


def main(model_name: str, file_path: str, log_path: str) -> None:
    """Train; the model as it was at the start is the reference."""
    renderer_name = model_info.get_recommended_renderer_name(model_name)
    dataset = DPODatasetBuilderFromComparisons(
        comparison_builder=ComparisonBuilderFromJsonl(train_path=file_path),
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=model_name,
            renderer_name=renderer_name,
            max_length=128,
            batch_size=4,
        ),
    )
    train_dpo.main(
        train_dpo.Config(
            log_path=log_path,
            model_name=model_name,
            recipe_name="prefer",
            renderer_name=renderer_name,
            dataset_builder=dataset,
            learning_rate=5e-3,
            dpo_beta=0.5,
            num_epochs=4,
            save_every=0,
        )
    )


if __name__ == "__main__":
    chz.entrypoint(main)
