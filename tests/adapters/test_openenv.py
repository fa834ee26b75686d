"""Environments of real OpenEnv servers, played by rollouts, recipes and pods."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.conftest import (
    GAMES,
    MODEL,
    play,
    python_of,
    run_tinsmith,
    served_pod,
    variables,
)
from tinsmith_local.process import ServerProcess

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
END = "<|im_end|>"


@contextmanager
def game(kind: str) -> Iterator[str]:
    """A server process of OpenEnv; its address."""
    with subprocess.Popen(
        [python_of("openenv"), GAMES / "guess_server.py", kind],
        env=variables(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def guess_url() -> Iterator[str]:
    with game("guess") as url:
        yield url


def asked(env: str, *texts: str, **further: Any) -> dict[str, Any]:
    return {"adapter": "openenv", "env": env, "texts": texts, **further}


def contents(told: dict[str, Any]) -> list[str]:
    return [message["content"] for message in told["messages"]]


def test_an_action_of_one_text_needs_no_settings(guess_url: str) -> None:
    typed = {"form": "function", "url": guess_url}
    raw, limited, by_argument, own_client = play(
        asked(guess_url, "1", "3", "5", seed=3),
        asked(guess_url, "3", seed=8, config={"reset": {"limit": 5}}),
        asked(guess_url, "3", seed=8, arguments={"limit": 5, "instruction": "Go."}),
        asked("guess_server:guess_client", "1", "3", seed=3, **typed),
    )
    assert contents(raw) == ["Guess a number below 10.", "1", "no", "3"]
    assert (raw["reason"], raw["rewards"], raw["said"]) == ("done", [-0.5, 1.0], f"1{END}3{END}")
    assert raw["infos"] == [{"metadata": {"said": "no"}}, {"metadata": {"said": "yes"}}]
    assert limited["rewards"] == [1.0]
    assert contents(by_argument) == ["Go.\nGuess a number below 5.", "3"]
    assert contents(own_client) == contents(raw)
    assert own_client["rewards"] == raw["rewards"]


def test_failures_and_silence_end_the_episode_with_a_reason(guess_url: str) -> None:
    refused = {"form": "function", "url": guess_url}
    problems = {
        "the game crashed": asked(guess_url, "crash"),
        "step took over 2 s, with what came before it": asked(
            guess_url, "sleep", arguments={"timeout_s": 2.0}
        ),
        "connecting failed": asked("http://127.0.0.1:9", "x"),
        "without .sync()": asked("guess_server:sync_client", "x", **refused),
        "known are: reset": asked(guess_url, "x", config={"split": "test"}),
    }
    for problem, told in zip(problems, play(*problems.values()), strict=True):
        assert told["reason"] == "environment_failed"
        assert problem in told["failure"]


def test_an_action_of_several_fields_needs_a_function() -> None:
    with game("move") as url:
        [told] = play(asked(url, "x"))
        assert "has the fields x (integer), y (integer)" in told["failure"]
        assert "give action=" in told["failure"]


def test_tools_are_called_and_a_turn_without_a_call_ends() -> None:
    with game("calc") as url:
        used, missing = play(
            asked(url, CALL, "It is 5."), asked(url, CALL.replace("add", "divide"), "?")
        )
    roles = [message["role"] for message in used["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert contents(used)[::2] == ["What is 2 + 3?", "5"]
    assert (used["reason"], used["rewards"]) == ("done", [1.0, 0.0])
    assert used["infos"][1] == {"ended_by": "a turn without a call"}
    assert used["said"] == f"{CALL}{END}It is 5.{END}"
    assert "divide" in contents(missing)[2]
    assert missing["rewards"] == [0.0, 0.0]


def test_a_client_of_tools_that_a_function_makes_is_played() -> None:
    with game("calc") as url:
        made = asked("guess_server:calc_client", CALL, "5.", form="function", url=url)
        used, raw = play(made, asked(url, CALL, "5."))
    assert contents(used) == contents(raw)
    assert used["rewards"] == raw["rewards"] == [1.0, 0.0]


def test_the_calls_of_a_turn_share_one_deadline() -> None:
    waiting = CALL.replace('"a": 2, "b": 3', '"a": 0, "b": 2')
    with game("calc") as url:
        [told] = play(asked(url, f"{waiting}\n{waiting}", arguments={"timeout_s": 3.0}))
    assert "the tool add took over 3 s, with what came before it" in told["failure"]


def test_the_schema_is_read_with_the_clients_headers_and_without_a_proxy() -> None:
    proxy = {"http_proxy": "http://127.0.0.1:9"}
    with game("private") as url:
        made = asked("guess_server:private_client", "3", form="function", url=url, seed=3)
        [told] = play(made, **proxy)
        [refused] = play(asked(url, "3", seed=3))
    assert told["rewards"] == [1.0]
    assert "403" in refused["failure"]


async def test_a_pod_serves_them_by_their_addresses(guess_url: str, tmp_path: Path) -> None:
    async with served_pod("openenv", f"guess=openenv:{guess_url}", log=tmp_path / "log") as pod:
        steps = await pod.play("guess", 4, "1", "4")
        assert [step.reward for step in steps] == [-0.5, 1.0]
        assert [step.done for step in steps] == [False, True]


def test_a_recipe_scores_a_class_of_the_users_file(
    server: ServerProcess, guess_url: str, tmp_path: Path
) -> None:
    words = (
        f"environment={GAMES / 'guess_environment.py'}:GuessEnvironment",
        f"base_model={MODEL}",
        *("num_validation=2", f"output_dir={tmp_path / 'out'}"),
    )
    run_tinsmith("openenv", server, "eval", *words, GUESS_URL=guess_url)
    scored = json.loads((tmp_path / "out/rewards.json").read_text())[MODEL]["rewards"]
    assert len(scored) == 2
    assert all(reward <= 1.0 for reward in scored)
