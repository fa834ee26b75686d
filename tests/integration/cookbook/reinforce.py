"""Rewards a model for answers that begin with a letter, on the prompts of a file."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chz
from tinker_cookbook import model_info, renderers
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

GROUPS_PER_BATCH = 4


class LetterEnv(ProblemEnv):
    """One prompt; the reward is 1 for a letter and 0 for anything else."""

    def __init__(self, prompt: str, renderer: renderers.Renderer) -> None:
        super().__init__(renderer, format_coef=0.0)
        self._prompt = prompt

    def get_question(self) -> str:
        return self._prompt

    def check_answer(self, sample_str: str) -> bool:
        return sample_str[:1].isalpha()

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "a letter"


class LetterDataset(RLDataset):
    """Groups of sixteen answers to one prompt."""

    def __init__(self, prompts: Sequence[str], renderer: renderers.Renderer) -> None:
        self._prompts = prompts
        self._renderer = renderer

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        prompts = self._prompts[index * GROUPS_PER_BATCH : (index + 1) * GROUPS_PER_BATCH]
        return [
            ProblemGroupBuilder(partial(LetterEnv, prompt, self._renderer), num_envs=16)
            for prompt in prompts
        ]

    def __len__(self) -> int:
        return len(self._prompts) // GROUPS_PER_BATCH


@chz.chz
class LetterDatasetBuilder(RLDatasetBuilder):
    """Reads one prompt a line."""

    file_path: str
    model_name: str
    renderer_name: str

    async def __call__(self) -> tuple[LetterDataset, None]:
        renderer = renderers.get_renderer(self.renderer_name, get_tokenizer(self.model_name))
        return LetterDataset(Path(self.file_path).read_text().splitlines(), renderer), None


def main(model_name: str, file_path: str, log_path: str, loss_beside: str = "") -> None:
    """Train in turns with sampling or, if a loss for that is given, beside it."""
    renderer_name = model_info.get_recommended_renderer_name(model_name)
    beside = None
    if loss_beside:
        beside = train.AsyncConfig(
            max_steps_off_policy=1, groups_per_batch=GROUPS_PER_BATCH, loss_fn=loss_beside
        )
    config = train.Config(
        log_path=log_path,
        model_name=model_name,
        recipe_name="reinforce",
        renderer_name=renderer_name,
        dataset_builder=LetterDatasetBuilder(
            file_path=file_path, model_name=model_name, renderer_name=renderer_name
        ),
        async_config=beside,
        learning_rate=1e-2,
        max_tokens=2,
        num_epochs=4,
        eval_every=0,
        save_every=8,
    )
    asyncio.run(train.main(config))


if __name__ == "__main__":
    chz.entrypoint(main)
