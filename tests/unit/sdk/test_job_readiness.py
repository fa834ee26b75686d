"""A driver waits for the pods that its recipe calls."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinsmith.driver import readiness
from tinsmith.driver.methods import read_method
from tinsmith.errors import FailedPreconditionError, UnavailableError


class FakeClient:
    """Answers with one step of what comes up after each question."""

    def __init__(self, *stages: tuple[bool, bool, bool]) -> None:
        self._stages = list(stages)
        self.environments = SimpleNamespace(list=self._find)
        self.episodes = SimpleNamespace(list=lambda queue: self._find())
        self.matches = SimpleNamespace(list=self._find)

    def list_models(self) -> list[Any]:
        if len(self._stages) > 1:
            self._stages.pop(0)
        trainable, sampleable, _ = self._stages[0]
        if not (trainable or sampleable):
            return []
        return [SimpleNamespace(base_model="m", trainable=trainable, sampleable=sampleable)]

    def _find(self) -> None:
        if not self._stages[0][2]:
            raise FailedPreconditionError("the server has no coordinator")


NOTHING, TRAINER, SAMPLER, BOTH, ALL = (
    (False, False, False),
    (True, False, False),
    (False, True, False),
    (True, True, False),
    (True, True, True),
)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)


@pytest.mark.parametrize(
    ("kind", "stages", "waited", "is_sampleable"),
    [
        ("supervised", [NOTHING, NOTHING, TRAINER], ["a trainer of the base model m"], False),
        ("supervised", [NOTHING, ALL], [], True),
        ("rl", [NOTHING, TRAINER, ALL], ["a sampler of the base model m"], True),
        ("self_play", [NOTHING, TRAINER, BOTH], ["a sampler of the base model m"], True),
        ("dpo", [NOTHING, TRAINER, BOTH], ["a sampler of the base model m"], True),
        ("distillation", [NOTHING, TRAINER, BOTH], ["a sampler of the base model m"], True),
        ("rl_episodes", [NOTHING, BOTH, BOTH, ALL], ["the coordinator"], True),
        ("match", [NOTHING, BOTH, BOTH, ALL], ["the coordinator"], True),
        ("evaluate", [NOTHING, NOTHING, SAMPLER], ["a sampler of the base model m"], True),
    ],
)
def test_what_a_recipe_needs_is_waited_for(
    kind: str,
    stages: list[tuple[bool, bool, bool]],
    waited: list[str],
    is_sampleable: bool,
    tmp_path: Path,
) -> None:
    method = read_method(f'{{"type": "{kind}", "model": "m"}}', tmp_path)
    said: list[str] = []
    client: Any = FakeClient(*stages)
    found = readiness.wait_ready({client: "m"}, method, timeout_s=5, say=said.append)
    assert (said, found) == ([f"waits for {what}" for what in waited], is_sampleable)


def test_every_agent_is_waited_for(tmp_path: Path) -> None:
    method = read_method('{"type": "match", "model": "m"}', tmp_path)
    said: list[str] = []
    first: Any = FakeClient(NOTHING, ALL)
    second: Any = FakeClient(NOTHING, NOTHING, BOTH, TRAINER, ALL)
    readiness.wait_ready({first: "m", second: "m"}, method, timeout_s=5, say=said.append)
    assert said == [
        "waits for a trainer of the base model m",
        "waits for the coordinator",
        "waits for a sampler of the base model m",
    ]


def test_waiting_ends(tmp_path: Path) -> None:
    method = read_method('{"type": "supervised", "model": "m"}', tmp_path)
    client: Any = FakeClient(NOTHING)
    with pytest.raises(UnavailableError, match="a trainer of the base model m is still not there"):
        readiness.wait_ready({client: "m"}, method, timeout_s=0.05, say=lambda _: None)
