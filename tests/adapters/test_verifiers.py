"""Environments of the real verifiers, played by rollouts, recipes and pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.adapters.conftest import GAMES, MODEL, play, run_tinsmith, served_pod
from tinsmith_local.process import ServerProcess

CALL = '<tool_call>\n{"name": "calculator_add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
END = "<|im_end|>"


def asked(env: Any, *texts: str, **further: Any) -> dict[str, Any]:
    return {"adapter": "verifiers", "env": env, "texts": texts, **further}


def contents(told: dict[str, Any]) -> list[str]:
    return [message["content"] for message in told["messages"]]


def test_one_turn_is_scored_by_all_rewards() -> None:
    right, chosen, by_argument, loaded = play(
        asked("sums_tasks", "3", seed=2),
        asked("sums_tasks", "no", config={"index": 1, "taskset": {"split": "eval"}}),
        asked("sums_tasks", "no", arguments={"split": "eval"}, seed=5),
        asked("sums_tasks", "no", form="loaded", seed=7),
    )
    assert contents(right) == ["Add.", "2 + 1 = ?", "3"]
    assert (right["reason"], right["rewards"], right["said"]) == ("done", [2.5], f"3{END}")
    [facts] = right["infos"]
    assert facts["rewards"] == {"correct": 1.0, "short": 0.5}
    assert facts["weights"] == {"correct": 2.0, "short": 1.0}
    assert facts["metrics"] == {"length": 1.0}
    assert (facts["stop_condition"], facts["task"]) == ("agent_completed", 2)
    assert contents(chosen) == contents(by_argument) == ["Add.", "101 + 1 = ?", "no"]
    assert chosen["rewards"] == [0.5]
    # An environment that was loaded keeps its view of the taskset, of one task.
    assert contents(loaded) == ["Add.", "3 + 1 = ?", "no"]


def test_the_environment_answers_as_the_user() -> None:
    found, left = play(asked("talk_tasks", "3", "4", "7", "8"), asked("talk_tasks", "3"))
    said = ["3", "No, not 3.", "4", "No, not 4.", "7"]
    assert contents(found) == ["Guess a number.", *said]
    assert (found["reason"], found["rewards"]) == ("done", [0.0, 0.0, 1.0])
    assert found["said"] == f"3{END}4{END}7{END}"
    assert (left["reason"], left["rewards"]) == ("max_turns", [0.0])


def test_tools_are_called_and_answer() -> None:
    used, missing, malformed = play(
        asked("calc_tasks", CALL, "5"),
        asked("calc_tasks", CALL.replace("_add", "_divide"), "?"),
        asked("calc_tasks", CALL.replace("2,", '"x",'), "?"),
    )
    roles = [message["role"] for message in used["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert used["messages"][2]["content"] == "5"
    assert (used["rewards"], used["said"]) == ([0.0, 1.0], f"{CALL}{END}5{END}")
    assert "unknown tool" in missing["messages"][2]["content"]
    assert "valid integer" in malformed["messages"][2]["content"]
    assert missing["rewards"] == malformed["rewards"] == [0.0, 0.0]


def test_a_taskset_without_an_end_is_played() -> None:
    [told] = play(asked("odd_tasks", "x", arguments={"kind": "endless"}, seed=10_007))
    assert contents(told) == ["Say 7.", "x"]
    assert told["rewards"] == [1.0]


def test_a_harness_of_the_taskset_plays_before_the_default_one() -> None:
    [told] = play(asked("bundle_tasks", "Hi."))
    assert contents(told) == ["Bundled: Hello.", "Hi."]


def test_episodes_at_once_share_the_locks_of_verifiers() -> None:
    both = play(asked("slow_tasks", "a"), asked("slow_tasks", "b"), together=True)
    assert [contents(told) for told in both] == [["Hello.", "a"], ["Hello.", "b"]]
    assert {told["reason"] for told in both} == {"done"}


def test_a_slow_taskset_and_a_proxy_for_the_loopback_are_failures() -> None:
    slow = {"load_s": 30.0, "timeout_s": 0.5}
    [late] = play(asked("slow_tasks", "x", arguments=slow))
    assert "took over 0.5 s to load its tasks" in late["failure"]
    proxy = {"http_proxy": "http://127.0.0.1:9"}
    [sent] = play(asked("sums_tasks", "3", seed=2), **proxy)
    assert "send such calls to a proxy; set NO_PROXY=127.0.0.1" in sent["failure"]
    [near] = play(asked("sums_tasks", "3", seed=2), **proxy, no_proxy="127.0.0.1")
    assert near["rewards"] == [2.5]


def test_a_failure_is_no_reward_of_zero_and_says_why() -> None:
    two = {"taskset": {"id": "sums_tasks"}, "id": "duel_env"}
    counted = {"taskset": {"id": "sums_tasks"}, "agent": {"max_total_tokens": 9}}
    repeated = {"taskset": {"id": "sums_tasks"}, "agent": {"retries": {"max_retries": 1}}}
    sampled = {"taskset": {"id": "sums_tasks"}, "agent": {"sampling": {"top_p": 0.5, "stop": "."}}}
    boxed = {"harness": {"id": "codex"}}
    problems = {
        "ValueError: no reward today": asked("odd_tasks", "x"),
        "makes no environment of 'no_such'": asked("no_such", "x"),
        "Extra inputs are not permitted": asked("sums_tasks", "x", arguments={"nothing": 1}),
        "index is 9, and there are 4 tasks": asked("sums_tasks", "x", config={"index": 9}),
        "taskset is refused": asked("sums_tasks", "x", config={"taskset": {"nothing": 1}}),
        "known are: index, taskset": asked("sums_tasks", "x", config={"split": "eval"}),
        "2 agents without a model of their own (first, second)": asked(two, "x"),
        "sets max_total_tokens": asked(counted, "x"),
        "sets retries": asked(repeated, "x"),
        "sets the sampling of top_p, and": asked(sampled, "x"),
        "needs a container for its CodexHarness": asked("sums_tasks", "x", arguments=boxed),
    }
    for problem, told in zip(problems, play(*problems.values()), strict=True):
        assert told["reason"] == "environment_failed"
        assert problem in told["failure"]


async def test_a_pod_serves_them_by_their_ids(tmp_path: Path) -> None:
    words = ("sums=verifiers:sums_tasks", "calc=verifiers:calc_tasks")
    async with served_pod("verifiers", *words, log=tmp_path / "log") as pod:
        [step] = await pod.play("sums", 2, "3")
        assert (step.reward, step.done) == (2.5, True)
        rewards = step.info.fields["rewards"].struct_value.fields
        assert rewards["correct"].number_value == 1.0
        [step] = await pod.play("calc", 0, "I need no tool.")
        assert (step.reward, step.done) == (0.0, True)


def test_a_recipe_trains_on_a_class_of_the_users_file(
    server: ServerProcess, tmp_path: Path
) -> None:
    words = (
        f"environment={GAMES / 'sums_tasks.py'}:SumsEnvironment",
        'validation_config={"taskset": {"split": "eval"}}',
        f"base_model={MODEL}",
        *("rank=4", "num_steps=1", "num_problems=2", "group_size=2", "num_validation=2"),
        f"output_dir={tmp_path / 'out'}",
        "keep_rollouts=jsonl",
    )
    run_tinsmith("verifiers", server, "run", "rl", *words)
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["turns"] == 1.0
    [trained] = (tmp_path / "out/rollouts").glob("train-*")
    [kept, *_] = [json.loads(line) for line in trained.read_text().splitlines()]
    assert kept["turns"][0]["info"]["rewards"].keys() == {"correct", "short"}
    assert "+ 1 = ?" in json.dumps(kept["messages"])
