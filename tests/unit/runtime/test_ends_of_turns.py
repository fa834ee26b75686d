"""A turn ends where the chat template ends it, beside what the settings of a model say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fakes.chat_models import tokenizer_files
from tests.fakes.family_templates import CHATML

from tinsmith.text.tokenizer import Tokenizer
from tinsmith_runtime.errors import ModelNotFoundError
from tinsmith_runtime.text.tokenizer_files import read_stop_token_ids

BARE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def write_model(folder: Path, template: str, **settings: object) -> Tokenizer:
    files = tokenizer_files(template)
    config = json.loads(files["tokenizer_config.json"]) | {"eos_token": "<|endoftext|>"}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(settings))
    return Tokenizer(files)


def test_the_end_of_turn_of_the_template_stops_a_base_model(tmp_path: Path) -> None:
    tokenizer = write_model(tmp_path, CHATML, eos_token_id=256)
    assert [tokenizer.token_to_id(end) for end in tokenizer.turn_ends] == [256, 258]
    assert read_stop_token_ids(tmp_path) == [256, 258]


@pytest.mark.parametrize("template", [BARE, "{{ raise_exception('no') }}", "{% for"])
def test_a_template_without_an_end_adds_none(tmp_path: Path, template: str) -> None:
    write_model(tmp_path, template, eos_token_id=[256, 7])
    assert read_stop_token_ids(tmp_path) == [256, 7]


def test_a_model_without_a_tokenizer_has_what_its_settings_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert read_stop_token_ids(tmp_path) == [3]


def test_a_tokenizer_that_is_none_is_refused_by_its_folder(tmp_path: Path) -> None:
    write_model(tmp_path, CHATML)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=f"the tokenizer in {tmp_path} cannot be read"):
        read_stop_token_ids(tmp_path)
