"""Distillation: a student learns to say what a teacher would.

On policy, which is the default, the student answers, and every token of it is rewarded by what the
teacher says to it: the negative reverse KL. Off policy, the student imitates answers of the
teacher: the first `num_imitation_steps` steps, or all of them. A teacher that is only told more, by
`teacher_prompt`, makes it prompt distillation: the student learns to do unasked what the prompt
asks for.

Both ways are those of Lu et al. 2025, https://thinkingmachines.ai/blog/on-policy-distillation, and
of tinker-cookbook. `teacher_kl` is the reverse KL by token; the score of held-out prompts is its
negative.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.names import whole_checkpoint
from tinsmith.recipes.experiment.beginnings import tokenizer_of
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.settings import RewardedConfig
from tinsmith.recipes.reinforcement import About, Summary, learn
from tinsmith.recipes.tasks.hub_data import data_name
from tinsmith.recipes.tasks.prompts import PromptSet, load_prompts
from tinsmith.recipes.teacher_source import Teacher, TeacherConfig, TeacherSource
from tinsmith.text.tokenizer import Tokenizer

__all__ = ["Config", "Summary", "main"]

_FILE = "@"
"""Begins a `teacher_prompt` that is the name of a file."""


@dataclass(frozen=True, kw_only=True)
class Config(RewardedConfig):
    """Settings of the recipe."""

    base_model: str = "tiny"
    """Of the student."""
    teacher: str = ""
    """A base model or a checkpoint, `run-1/final`; the student's base model if it is empty."""
    teacher_prompt: str = ""
    """What only the teacher is told, as its system message; `@FILE` reads it from a file."""
    data: str = "small_sums"
    """`small_sums`, `arithmetic`, `pig_latin`; a JSONL file or folder of prompts or conversations,
    or `hf://NAME`."""
    begin_from: str = ""
    """A checkpoint that the student begins from, `run-1/final`; the base model if it is empty."""
    learning_rate: float | None = None
    """Its peak; if it is left out, what `tinsmith hyperparams` advises for the model."""
    num_imitation_steps: int = 0
    """Steps off policy, of `num_steps`: the first ones."""
    num_demonstrations: int = 64
    """Answers of the teacher that such a step imitates."""
    num_prompts: int = 32
    """Prompts of a step on policy."""
    num_samples: int = 2
    """Answers to each."""
    kl_coef: float = 1.0
    """Factor of the advantages."""
    kl_discount_factor: float = 0.0
    """Share of what later tokens lose that counts for a token; 0 for its own alone."""
    max_tokens: int = 8
    """Tokens of an answer."""
    num_validation: int = 64
    """Held-out prompts that are scored, at most."""


def main(config: Config, client: Client, observer: Observer | None = None) -> Summary:
    """Train, and score held-out prompts before and after.

    Of an experiment that ended, nothing is repeated: what came out is returned.

    Raises:
        ConfigurationError: If the data cannot be read, a prompt is too long, or `output_dir` holds
            another experiment. If the teacher would teach nothing, or reads other tokens.
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    # All that can be wrong with the data is found before anything is made on the server.
    prompts = load_prompts(config.data)
    config = dataclasses.replace(config, teacher_prompt=_read_prompt(config.teacher_prompt))
    begin_from = (observer.begin_from if observer else "") or config.begin_from
    tokenizer = tokenizer_of(client, config.base_model, begin_from)
    teacher = _open_teacher(config, begin_from, client, tokenizer, prompts)
    _check_lengths(config, client, tokenizer, teacher, prompts)
    settings = TeacherConfig(
        num_prompts=config.num_prompts,
        num_samples=config.num_samples,
        num_demonstrations=config.num_demonstrations,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        kl_coef=config.kl_coef,
        kl_discount_factor=config.kl_discount_factor,
        num_validation=config.num_validation,
        seed=config.seed,
    )
    [summary] = learn(
        About("distillation", data_name(config.data), "answers"),
        config,
        client,
        lambda progress, _: TeacherSource(
            settings, progress.run.sampler(), tokenizer, prompts, teacher
        ),
        observer,
    )
    return summary


def _read_prompt(text: str) -> str:
    """Return what a teacher is told, from a file if it names one."""
    if not text.startswith(_FILE):
        return text
    path = Path(text.removeprefix(_FILE)).expanduser()
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"teacher_prompt: {path} cannot be read: {error}", remedy="check the path"
        ) from error


def _open_teacher(
    config: Config, begin_from: str, client: Client, tokenizer: Tokenizer, prompts: PromptSet
) -> Teacher:
    """Return the teacher of a student that begins from a checkpoint, or from its base model.

    Raises:
        ConfigurationError: If it is the student itself, or reads other tokens.
    """
    served = {model.base_model for model in client.list_models()}
    name, student = (
        each if each in served else whole_checkpoint(each, client.project)
        for each in (config.teacher or config.base_model, begin_from or config.base_model)
    )
    is_checkpoint = "checkpoints" in name.split("/")
    if not config.teacher_prompt and name == student:
        raise ConfigurationError(
            f"the teacher is {name}, which is what the student begins with",
            remedy="give teacher= a better model or checkpoint, or teacher_prompt= what it is told",
        )
    sampler = client.create_sampler(
        base_model="" if is_checkpoint else name, checkpoint=name if is_checkpoint else ""
    )
    own = sampler.get_tokenizer()
    texts = [str(message["content"]) for prompt in prompts.train for message in prompt]
    if sampler.base_model != config.base_model and any(
        own.encode(text) != tokenizer.encode(text) for text in texts
    ):
        raise ConfigurationError(
            f"{sampler.base_model} reads other tokens than {config.base_model}, and its "
            "log-probabilities are of those",
            remedy="choose a teacher of the same family",
        )
    return Teacher(sampler, own, config.teacher_prompt)


def _check_lengths(
    config: Config, client: Client, tokenizer: Tokenizer, teacher: Teacher, prompts: PromptSet
) -> None:
    """Raise for a prompt that leaves no room for an answer, as student or teacher reads it."""
    served = {model.base_model: model.max_context_tokens for model in client.list_models()}
    teacher_model = teacher.sampler.base_model
    for where, messages in prompts.placed():
        as_student = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        for who, model, tokens in (
            ("student", config.base_model, as_student),
            ("teacher", teacher_model, teacher.prompt(messages)),
        ):
            if len(tokens) + config.max_tokens > served[model]:
                raise ConfigurationError(
                    f"{where}: the {who} reads {len(tokens)} tokens and may answer with "
                    f"{config.max_tokens}; the context of {model} has {served[model]}",
                    remedy="shorten the prompt, or lower max_tokens",
                )
