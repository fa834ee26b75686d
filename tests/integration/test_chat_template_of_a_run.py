"""A base model without a chat template: trained, asked and exported by a template by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.integration.servers import Deployment, embedded_server

import tinsmith
from tinsmith.recipes import supervised
from tinsmith.rollouts import RolloutConfig
from tinsmith.text.named_templates import ROLE_COLON

ASKED: Any = [{"role": "user", "content": "ping"}]
OWN = (
    "{% for m in messages %}{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|im_start|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant>{% endif %}"
)
"""Ends answers with a token at which the base model does not stop."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Deployment]:
    """A server of a base model without a chat template."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template", None)
    path.write_text(json.dumps(settings))
    with embedded_server(tmp_path_factory.mktemp("server"), folder) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def owner(bare: Deployment) -> Iterator[tinsmith.Client]:
    with bare.client() as client:
        yield client


@pytest.fixture(scope="module")
def trained(owner: tinsmith.Client, tmp_path_factory: pytest.TempPathFactory) -> supervised.Summary:
    """A run that answers `ping`, trained by the recipe."""
    folder = tmp_path_factory.mktemp("trained")
    data = folder / "rows.jsonl"
    row = {"messages": [*ASKED, {"role": "assistant", "content": "pong"}]}
    data.write_text(f"{json.dumps(row)}\n" * 4)
    return supervised.main(
        supervised.Config(
            data=str(data),
            chat_template="role_colon",
            num_steps=30,
            num_warmup_steps=2,
            learning_rate=2e-2,
            batch_size=3,
            max_tokens=8,
            output_dir=folder / "run",
        ),
        owner,
    )


def openai_of(bare: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{bare.address}/v1", api_key=bare.api_key, max_retries=0)


def test_run_and_checkpoint_are_asked_by_the_template(
    bare: Deployment, owner: tinsmith.Client, trained: supervised.Summary
) -> None:
    assert owner.runs.get(trained.run).info.chat_template == ROLE_COLON
    tokenizer = owner.runs.get(trained.run).get_tokenizer()
    wanted = tokenizer.encode("User: ping\n\nAssistant:", add_special_tokens=False)
    with openai_of(bare) as client:
        for model in (trained.run, trained.checkpoint):
            answer = client.chat.completions.create(
                model=model, messages=ASKED, max_tokens=16, temperature=0
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(wanted)
            assert (answer.choices[0].message.content or "").strip() == "pong"
            assert answer.choices[0].finish_reason == "stop"
    claude = anthropic.Anthropic(
        base_url=f"http://{bare.address}", api_key=bare.api_key, max_retries=0
    )
    with claude:
        said = claude.messages.create(model=trained.checkpoint, messages=ASKED, max_tokens=16)
        known = said.usage.cache_read_input_tokens or 0
        assert said.usage.input_tokens + known == len(wanted)


def test_the_base_model_itself_still_has_none(
    bare: Deployment, trained: supervised.Summary
) -> None:
    del trained
    with openai_of(bare) as client, pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny", messages=ASKED)


def test_samplers_forks_and_runs_from_the_checkpoint_have_it(
    owner: tinsmith.Client, trained: supervised.Summary
) -> None:
    sampler = owner.create_sampler(checkpoint=trained.checkpoint)
    assert sampler.get_tokenizer().chat_template == ROLE_COLON
    begun = owner.create_training_run_from_checkpoint(trained.checkpoint)
    assert begun.info.chat_template == ROLE_COLON
    assert owner.runs.fork(trained.run, 1).info.chat_template == ROLE_COLON


def test_a_checkpoint_is_not_copied_to_a_run_that_would_ask_it_otherwise(
    owner: tinsmith.Client, trained: supervised.Summary
) -> None:
    other = owner.create_lora_training_run("tiny", 4)
    with pytest.raises(tinsmith.FailedPreconditionError, match="another chat template"):
        owner.checkpoints.copy(trained.checkpoint, other, "copied").result()
    begun = owner.create_training_run_from_checkpoint(trained.checkpoint)
    owner.checkpoints.copy(trained.checkpoint, begun, "copied").result()


def test_exports_carry_it(
    owner: tinsmith.Client, trained: supervised.Summary, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    merged = owner.checkpoints.export(trained.checkpoint, "merged").result()
    owner.checkpoints.download(merged, tmp_path / "merged")
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path / "merged")
    whole = loaded.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    assert whole == "User: ping\n\nAssistant:"
    peft = owner.checkpoints.export(trained.checkpoint).result()
    owner.checkpoints.download(peft, tmp_path / "peft")
    assert (tmp_path / "peft" / "chat_template.jinja").read_text() == ROLE_COLON


def test_the_end_of_a_file_s_answers_stops_samples_and_exports(
    owner: tinsmith.Client, tmp_path: Path
) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(OWN)
    run = owner.create_lora_training_run("tiny", 4, chat_template=str(path))
    tokenizer = run.get_tokenizer()
    end = tokenizer.token_to_id("<|im_start|>")
    tokens = tokenizer.encode("ab", add_special_tokens=False) + [end] * 6
    datum = tinsmith.Datum(
        tinsmith.ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    for _ in range(15):
        run.forward_backward([datum])
        run.optim_step(tinsmith.AdamParams(learning_rate=2e-2)).result()
    params = tinsmith.SamplingParams(max_tokens=8, temperature=0.0)
    [sequence] = run.sampler().sample(tokens[:-5], sampling_params=params).result().sequences
    assert (sequence.stop_reason, list(sequence.tokens)) == ("stop", [end])
    saved = run.save_weights_for_sampler("w").result()
    merged = owner.checkpoints.export(saved, "merged").result()
    owner.checkpoints.download(merged, tmp_path / "merged")
    settings = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert end in settings["eos_token_id"]


def test_the_server_plays_by_named_templates_alone(
    owner: tinsmith.Client, trained: supervised.Summary, tmp_path: Path
) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(OWN)
    run = owner.create_lora_training_run("tiny", 4, chat_template=str(path))
    params = tinsmith.SamplingParams(max_tokens=4)
    with pytest.raises(tinsmith.TinsmithError, match="play its episodes in the client"):
        owner.rollouts.generate("guessing", [1], sampler=run.sampler(), params=params)
    named = owner.create_sampler(checkpoint=trained.checkpoint)
    # Few turns: what is drawn without a seed may guess until the context is full.
    config = RolloutConfig(max_turns=2)
    batch = owner.rollouts.generate("guessing", [1], sampler=named, config=config, params=params)
    [group] = batch.result().groups
    assert group


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        pytest.param("alpaca", None, "use role_colon, or a file that ends with .jinja", id="name"),
        pytest.param("no.jinja", None, "cannot be read", id="no-file"),
        pytest.param("cut.jinja", "{% for m in messages %}", "cannot be read", id="cut"),
        pytest.param("deaf.jinja", "{{ eos_token }}", "leaves no trace", id="deaf"),
        pytest.param(
            "endless.jinja",
            "{% for m in messages %}{{ m.content }}\n{% endfor %}",
            "write {{ eos_token }} behind an answer",
            id="endless",
        ),
    ],
)
def test_what_is_no_template_is_refused_with_the_remedy(
    owner: tinsmith.Client, tmp_path: Path, name: str, source: str | None, message: str
) -> None:
    path = tmp_path / name
    if source is not None:
        path.write_text(source)
    given = str(path) if name.endswith(".jinja") else name
    before = len(owner.runs.list())
    with pytest.raises(tinsmith.ConfigurationError) as refused:
        owner.create_lora_training_run("tiny", 4, chat_template=given)
    assert message in str(refused.value)
    assert len(owner.runs.list()) == before
