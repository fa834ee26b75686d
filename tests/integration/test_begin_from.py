"""From one recipe to the next: a run begins from what another experiment left."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.servers import Deployment
from typer.testing import CliRunner

import tinsmith
from tinsmith.cli.app import build_app
from tinsmith.names import shorten
from tinsmith.recipes import rl, self_play, supervised, two_policies
from tinsmith.recipes.experiment.beginnings import create_run

TOKENS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def client(embedded: Deployment) -> Iterator[tinsmith.Client]:
    with embedded.client() as client:
        yield client


@pytest.fixture(scope="module")
def saved(client: tinsmith.Client, tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> str:
    config = supervised.Config(
        data=str(few_rows),
        rank=2,
        num_steps=2,
        batch_size=4,
        output_dir=tmp_path_factory.mktemp("supervised"),
    )
    return shorten(supervised.main(config, client).checkpoint)


def logprobs(client: tinsmith.Client, **source: str) -> list[float | None]:
    return list(client.create_sampler(**source).compute_logprobs(TOKENS).result())


@pytest.mark.parametrize(
    "config", [supervised.Config(), rl.Config(), self_play.Config(), two_policies.Config()]
)
def test_a_run_begins_with_the_weights_and_without_the_optimizer(
    client: tinsmith.Client, saved: str, config: rl.Config
) -> None:
    run = create_run(replace(config, begin_from=saved), client, saved)
    assert logprobs(client, run=run.name) == logprobs(client, checkpoint=saved)
    assert logprobs(client, run=run.name) != logprobs(client, base_model="tiny")
    assert run.version == 0


def test_reinforcement_goes_on_after_supervised_steps(
    client: tinsmith.Client, saved: str, tmp_path: Path
) -> None:
    config = rl.Config(
        begin_from=saved,
        data="small_sums",
        num_steps=1,
        num_problems=2,
        group_size=2,
        num_validation=2,
        output_dir=tmp_path,
    )
    summary = rl.main(config, client)
    assert client.runs.get(summary.run).info.display_name == "small_sums"
    assert client.runs.get(summary.run).info.rank == 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"adapter": "full"}, "holds an adapter, and adapter is full.*give adapter=lora"),
        ({"chat_template": "role_colon"}, "has its chat template.*leave chat_template or"),
        ({"base_model": "other"}, "is of tiny, and base_model is other.*give base_model=tiny"),
    ],
)
def test_settings_that_do_not_fit_are_refused_and_leave_no_run(
    client: tinsmith.Client, saved: str, changes: dict[str, str], problem: str
) -> None:
    num_before = len(client.runs.list())
    config = replace(supervised.Config(begin_from=saved), **changes)  # type: ignore[arg-type]
    with pytest.raises(tinsmith.ConfigurationError, match=problem):
        create_run(config, client, saved)
    assert len(client.runs.list()) == num_before


def test_a_checkpoint_that_is_not_there_is_said(client: tinsmith.Client, tmp_path: Path) -> None:
    config = rl.Config(begin_from="run-none/final", output_dir=tmp_path / "out")
    with pytest.raises(tinsmith.NotFoundError, match="run-none"):
        rl.main(config, client)


def invoke(embedded: Deployment, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setenv("TINSMITH_ADDRESS", embedded.address)
    monkeypatch.setenv("TINSMITH_API_KEY", embedded.api_key)
    result = CliRunner().invoke(build_app(words), [*words])
    return result.output + (f"{result.exception}" if result.exception else "")


def test_a_recipe_of_ones_own_is_run_from_its_file(
    embedded: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "count.py"
    file.write_text(
        textwrap.dedent('''
            """Counts the models that are served."""

            from dataclasses import dataclass


            @dataclass(frozen=True, kw_only=True)
            class Config:
                times: int = 1
                """How often."""


            def main(config, client, observer=None):
                for _ in range(config.times):
                    print("served:", [model.base_model for model in client.list_models()])
        ''')
    )
    said = invoke(embedded, monkeypatch, "run", str(file), "times=2")
    assert said.count("served: ['tiny']") == 2
    assert "How often." in invoke(embedded, monkeypatch, "run", str(file), "--help")
    assert "did you mean times" in invoke(embedded, monkeypatch, "run", str(file), "time=2")
    file.with_name("empty.py").write_text("")
    said = invoke(embedded, monkeypatch, "run", str(file.with_name("empty.py")))
    assert "has no Config" in said
    file.with_name("broken.py").write_text("import no_such_module")
    said = invoke(embedded, monkeypatch, "run", str(file.with_name("broken.py")))
    assert "cannot be imported: ModuleNotFoundError" in said


def test_scores_are_compared_from_the_command_line(
    embedded: Deployment,
    client: tinsmith.Client,
    saved: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "my.py").write_text("def score(row, completion):\n    return row['answer'] != ''\n")
    said = invoke(
        embedded,
        monkeypatch,
        "eval",
        "base_model=tiny",
        f"checkpoint={saved}",
        "data=arithmetic",
        f"reward={tmp_path / 'my.py'}:score",
        "num_validation=4",
        f"output_dir={tmp_path / 'out'}",
    )
    assert "above tiny" in said
    assert "+0.000 ± 0.000" in said


def test_an_environment_of_ones_own_begins_with_one_that_works(
    embedded: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "guessing" in invoke(embedded, monkeypatch, "environments", "list")
    said = invoke(embedded, monkeypatch, "environments", "new", "letters.py:LettersEnvironment")
    command = next(line for line in said.splitlines() if line.startswith("  tinsmith run rl"))
    words = [*command.split()[1:], "num_steps=1", "num_problems=2", "group_size=8"]
    said = invoke(embedded, monkeypatch, *words, "num_validation=2", "output_dir=out")
    assert "validation reward" in said
    # Random weights are rarely right, and learn: every group has better plays and worse ones.
    assert "trained 16 " in said
    again = invoke(embedded, monkeypatch, "environments", "new", "letters.py:LettersEnvironment")
    assert "cannot be written: File exists" in again
    assert "is not FILE.py:CLASS" in invoke(embedded, monkeypatch, "environments", "new", "letters")
