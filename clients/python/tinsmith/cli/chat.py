"""`tinsmith chat`: a conversation with a base model, a checkpoint or the live weights of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.sample import BaseModel, Checkpoint, Run, check_source, open_source
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import ModelInput, SamplingParams

_PROMPT = "> "
_CLEAR = "/clear"
_CUT = "\N{REPLACEMENT CHARACTER}"
"""What the tokens of a character give that has not arrived in full."""


def chat(
    base_model: BaseModel = "",
    checkpoint: Checkpoint = "",
    run: Run = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Length of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="Makes the answers repeatable.")] = None,
) -> None:
    """Talk to a model, a line a turn; `/clear` begins anew, Ctrl-D ends.

    With `--run`, each answer is of the newest weights.
    """
    check_source(base_model, checkpoint, run)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    beginning = [{"role": "system", "content": system}] if system else []
    with connect("tinsmith chat") as client:
        sampler = open_source(client, base_model, checkpoint, run)
        tokenizer = sampler.get_tokenizer()
        messages = list(beginning)
        for words in _turns():
            if words == _CLEAR:
                messages = list(beginning)
                continue
            messages.append({"role": "user", "content": words})
            answer = ""
            for part in _answer(sampler, tokenizer, messages, params):
                print(part, end="", flush=True)
                answer += part
            print()
            messages.append({"role": "assistant", "content": answer})


def _turns() -> Iterator[str]:
    """Yield what the user says, until the end of the input; nothing for empty lines."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    while True:
        try:
            words = input(_PROMPT).strip()
        except EOFError:
            print()
            return
        if words:
            yield words


def _answer(
    sampler: Sampler, tokenizer: Tokenizer, messages: list[dict[str, str]], params: SamplingParams
) -> Iterator[str]:
    """Yield the model's answer as text, part by part, as its tokens are drawn."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    tokens: list[int] = []
    shown = ""
    for chunk in sampler.stream(ModelInput.from_ints(prompt), sampling_params=params):
        tokens += chunk.tokens
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        is_whole = bool(chunk.stop_reason) or not text.endswith(_CUT)
        if is_whole and text != shown:
            yield text[len(shown) :]
            shown = text
