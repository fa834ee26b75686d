"""A base model whose texts end otherwise than its turns: trained on its template, it stops."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.integration.servers import Deployment, embedded_server

from tinsmith.recipes import supervised
from tinsmith_local.tiny_model import END_OF_TEXT, TURN_END

ASKED: Any = [{"role": "user", "content": "ping"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Deployment]:
    """A server of a model whose settings end texts alone."""
    folder = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(model_dir, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = END_OF_TEXT
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("config.json", "generation_config.json"):
        found = json.loads((folder / name).read_text())
        found["eos_token_id"] = 0
        (folder / name).write_text(json.dumps(found))
    with embedded_server(tmp_path_factory.mktemp("server"), folder) as deployment:
        yield deployment


def test_a_trained_base_model_stops_here_and_where_it_is_exported_to(
    base: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    row = {"messages": [*ASKED, {"role": "assistant", "content": "pong"}]}
    data.write_text(f"{json.dumps(row)}\n" * 4)
    config = supervised.Config(
        data=str(data),
        num_steps=30,
        num_warmup_steps=2,
        learning_rate=2e-2,
        batch_size=3,
        max_tokens=8,
        output_dir=tmp_path / "run",
    )
    with base.client() as client:
        trained = supervised.main(config, client)
        assert f"answers end with {TURN_END}, which stops samples" in capsys.readouterr().out
        with openai.OpenAI(
            base_url=f"http://{base.address}/v1", api_key=base.api_key, max_retries=0
        ) as asker:
            for model in (trained.run, trained.checkpoint):
                answer: Any = asker.chat.completions.create(
                    model=model,
                    messages=ASKED,
                    max_tokens=24,
                    temperature=0,
                    extra_body={"return_token_ids": True},
                )
                [choice] = answer.choices
                assert (choice.message.content, choice.finish_reason) == ("pong", "stop")
                end = client.get_tokenizer("tiny").token_to_id(TURN_END)
                assert choice.token_ids[-1] == end
        merged = client.checkpoints.export(trained.checkpoint, "merged").result()
        client.checkpoints.download(merged, tmp_path / "merged")
    settings = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [0, end]
