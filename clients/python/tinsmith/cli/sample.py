"""`tinsmith sample`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.output import show_json
from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.types import ModelInput, SampledSequence, SamplingParams

BaseModel = Annotated[str, typer.Option(help="Sample from a base model.")]
Checkpoint = Annotated[str, typer.Option(help="Sample from a checkpoint.")]
Run = Annotated[str, typer.Option(help="Sample from the live weights of a run.")]


def check_source(base_model: str, checkpoint: str, run: str) -> None:
    """Refuse a command that names no source of samples, or several.

    Raises:
        ConfigurationError: Unless exactly one is given.
    """
    if sum(map(bool, (base_model, checkpoint, run))) != 1:
        raise ConfigurationError(
            "a sample needs one source",
            remedy="give one of --base-model, --checkpoint and --run",
        )


def open_source(client: Client, base_model: str, checkpoint: str, run: str) -> Sampler:
    """Return a sampler of what a command names."""
    return client.create_sampler(base_model=base_model, checkpoint=checkpoint, run=run)


def sample(
    words: Annotated[
        str, typer.Argument(metavar="[PROMPT]", help="What to say to the model.")
    ] = "",
    prompt: Annotated[str, typer.Option(help="The same as an option.")] = "",
    base_model: BaseModel = "",
    checkpoint: Checkpoint = "",
    run: Run = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    raw: Annotated[bool, typer.Option(help="Send the prompt without chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Length at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of the distribution.")] = 1.0,
    num_samples: Annotated[int, typer.Option("-n", "--num-samples", help="Completions.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Makes the draw repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with tokens.")] = False,
) -> None:
    """Sample from a base model, a checkpoint or a run."""
    if bool(words) == bool(prompt):
        raise ConfigurationError(
            "two prompts are given" if words else "no prompt is given",
            remedy='write it once: tinsmith sample "a prompt" --base-model NAME',
        )
    prompt = words or prompt
    check_source(base_model, checkpoint, run)
    with connect("tinsmith sample") as client:
        sampler = open_source(client, base_model, checkpoint, run)
        tokenizer = sampler.get_tokenizer()
        if raw:
            tokens = tokenizer.encode(prompt)
        else:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": prompt})
            tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
        )
        result = sampler.sample(
            ModelInput.from_ints(tokens), sampling_params=params, num_samples=num_samples
        ).result()
        texts = [
            tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            for sequence in result.sequences
        ]
    if as_json:
        rows = zip(result.sequences, texts, strict=True)
        samples = [{"text": text, **dataclasses.asdict(sequence)} for sequence, text in rows]
        show_json({"seed": result.seed, "samples": samples})
        return
    for index, (sequence, text) in enumerate(zip(result.sequences, texts, strict=True)):
        if num_samples > 1:
            print(f"--- {index + 1}")
        print(text)
        if not text.strip():
            print(_describe_silence(sequence), file=sys.stderr)


def _describe_silence(sequence: SampledSequence) -> str:
    """Return why an answer shows nothing."""
    if sequence.stop_reason == "stop":
        return "the answer is empty: the model ended its turn at once"
    return f"the answer is empty: none of its {len(sequence.tokens)} tokens is text"
