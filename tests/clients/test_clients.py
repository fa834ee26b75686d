"""Clients of OpenAI's API, unmodified and as their first pages have it, against a server process.

Each program of `programs/` runs under the Python of an environment that `make venv-clients` makes,
told URL and key alone. The model knows nothing. What makes its answers well-formed is the server:
calls are forced, and schemas are kept by token masks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.clients.users import BIN, User

from tinsmith_local.process import ServerProcess
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model

MODEL = "tiny"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyModelConfig(max_position_embeddings=8192, num_layers=1, hidden_size=64)
    return build_tiny_model(tmp_path_factory.mktemp("model"), config)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServerProcess]:
    assert (BIN / "python").exists(), "run make venv-clients first"
    with ServerProcess(tmp_path_factory.mktemp("server"), {MODEL: model_dir}) as server:
        yield server


@pytest.fixture
def user(server: ServerProcess, tmp_path: Path) -> User:
    return User(server, tmp_path)


def test_openai_agents_runs_a_loop_of_tools_by_both_apis(user: User) -> None:
    told = user.run_program("openai_agents", MODEL)
    assert [one["api"] for one in told] == ["responses", "chat_completions"]
    loop = ["tool_call_item", "tool_call_output_item", "message_output_item"]
    for one in told:
        assert one["kinds"][:2] == one["streamed_kinds"][:2] == loop[:2]
        assert one["num_asked"] >= 2
        assert one["is_verdict"]


def test_pydantic_ai_gets_its_types(user: User) -> None:
    (told,) = user.run_program("pydantic_ai_schema", MODEL)
    assert told["types"] == ["City"] * 3
    assert told["num_tokens"] > 0


def test_langchain_gets_messages_calls_and_structures(user: User) -> None:
    (told,) = user.run_program("langchain_chat", MODEL)
    assert told["num_tokens"] > 0
    assert told["responses_tokens"] > 0
    assert told["num_chunks"] > 1
    assert told["calls"][0] == "add"
    assert told["sum"]
    assert told["verdicts"] == ["Verdict", "Verdict"]


def test_litellm_gets_calls_schemas_and_its_own_error(user: User) -> None:
    (told,) = user.run_program("litellm_completion", MODEL)
    assert told["num_tokens"] <= 16
    assert told["num_chunks"] > 1
    assert told["calls"][0] == "get_time"
    assert told["verdict"] == ["ok"]
    assert told["problem"] == "ContextWindowExceededError"


def test_inspect_ai_evaluates_a_task_with_a_tool(user: User) -> None:
    (told,) = user.run_program("inspect_ai_task", MODEL, user.folder / "logs")
    assert told["status"] == "success", told["error"]
    assert told["roles"] == ["user", "assistant", "tool"]
    assert told["num_scores"] == 1


def test_verifiers_draws_rollouts(user: User) -> None:
    (told,) = user.run_program("verifiers_rollouts", MODEL)
    assert told["rewards"] == [1.0] * 4


def test_lm_eval_scores_choices_as_the_server_does(user: User, model_dir: Path) -> None:
    questions = user.folder / "questions.jsonl"
    questions.write_text('{"question": "Say cat:"}\n{"question": "Again:"}\n')
    tasks = user.folder / "tasks"
    tasks.mkdir()
    (tasks / "choices.yaml").write_text(
        json.dumps(
            {
                "task": "choices",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(questions)}},
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_choice": ["cat", "dog"],
                "doc_to_target": 0,
                "metric_list": [{"metric": "acc", "aggregation": "mean"}],
            }
        )
    )
    arguments = {
        "model": MODEL,
        "base_url": f"{user.url}/v1/completions",
        "tokenizer": model_dir,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
    }
    joined = ",".join(f"{name}={value}" for name, value in arguments.items())
    user.run(
        *(BIN / "lm_eval", "run", "--model", "local-completions", "--model_args", joined),
        *("--tasks", "choices", "--include_path", tasks),
        *("--output_path", user.folder / "results", "--log_samples"),
    )
    (samples,) = (user.folder / "results").rglob("samples_choices_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == 2
    with openai.OpenAI(base_url=f"{user.url}/v1", api_key=user.key) as client:
        for row in rows:
            for choice, reply in zip(("cat", "dog"), row["filtered_resps"], strict=True):
                expected = _score(client, row["doc"]["question"], f" {choice}")
                assert float(reply[0]) == pytest.approx(expected, abs=1e-4)


def _score(client: openai.OpenAI, prompt: str, continuation: str) -> float:
    answer = client.completions.create(
        model=MODEL, prompt=prompt + continuation, max_tokens=0, echo=True, logprobs=0
    )
    scored: Any = answer.choices[0].logprobs
    values = zip(scored.text_offset, scored.token_logprobs, strict=True)
    return float(sum(value for offset, value in values if offset >= len(prompt)))


def test_guidellm_loads_the_server_without_an_error(user: User, model_dir: Path) -> None:
    report = user.folder / "report.json"
    user.run(
        *(BIN / "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={user.url},model={MODEL},api_key={user.key}"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=40"),
        *("--tokenizer", f"kind=hf_auto,model={model_dir}"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=16"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"]
    assert len(requests["successful"]) == 40
    # `ignore_eos` and the limit give each answer the length that was asked for.
    assert {one["output_tokens"] for one in requests["successful"]} == {16}
