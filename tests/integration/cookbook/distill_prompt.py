"""Moves what a prompt asks for into the weights: the teacher sees the prompt, the student does not.

The answers of the teacher become the conversations that the student is trained on.
"""

import asyncio
import json
from pathlib import Path

import chz
import tinker
from tinker_cookbook import checkpoint_utils, model_info, renderers
from tinker_cookbook.completers import TinkerMessageCompleter
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer


async def ask(
    model_path: str, renderer: renderers.Renderer, questions: list[str], prompt: str = ""
) -> list[str]:
    """Return the likeliest answers of a model, to the questions after the prompt."""
    service = tinker.ServiceClient()
    complete = TinkerMessageCompleter(
        await service.create_sampling_client(model_path=model_path),
        renderer,
        max_tokens=8,
        temperature=0.0,
    )
    prefix = [renderers.Message(role="system", content=prompt)] if prompt else []
    answers = await asyncio.gather(
        *(complete([*prefix, {"role": "user", "content": question}]) for question in questions)
    )
    return [renderers.get_text_content(answer) for answer in answers]


def checkpoint_of(log_path: str) -> checkpoint_utils.CheckpointRecord:
    """Return where a training left its weights."""
    record = checkpoint_utils.get_last_checkpoint(log_path)
    assert record is not None
    return record


async def main(
    model_name: str, teacher_log_path: str, prompt: str, file_path: str, log_path: str
) -> None:
    """Ask the teacher, train the student, and write down the answers of both."""
    teacher = checkpoint_of(teacher_log_path)
    questions = Path(file_path).read_text().splitlines()
    renderer_name = model_info.get_recommended_renderer_name(model_name)
    renderer = renderers.get_renderer(renderer_name, get_tokenizer(model_name))

    taught = await ask(teacher.sampler_path, renderer, questions, prompt)
    before = await ask(teacher.sampler_path, renderer, questions)
    rows = Path(log_path).with_suffix(".jsonl")
    with rows.open("w") as file:
        for question, answer in [*zip(questions, taught, strict=True)] * 4:
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")

    config = train.Config(
        log_path=log_path,
        model_name=model_name,
        recipe_name="distill_prompt",
        renderer_name=renderer_name,
        load_checkpoint_path=teacher.state_path,
        dataset_builder=FromConversationFileBuilder(
            file_path=str(rows),
            common_config=ChatDatasetBuilderCommonConfig(
                model_name_for_tokenizer=model_name,
                renderer_name=renderer_name,
                max_length=128,
                batch_size=8,
            ),
        ),
        learning_rate=5e-3,
        num_epochs=10,
        save_every=0,
    )
    await train.main(config)
    after = await ask(checkpoint_of(log_path).sampler_path, renderer, questions)
    answers = {"taught": taught, "before": before, "after": after}
    (Path(log_path) / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    asyncio.run(chz.entrypoint(main))
