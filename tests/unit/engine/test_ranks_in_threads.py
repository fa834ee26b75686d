"""Ranks share the work of an engine: as threads; `distributed/` has them as processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.thread_ranks import run_as_threads
from tests.unit.engine.conftest import relative_error, save_tiny
from tests.unit.engine.distributed import scenarios

from tinsmith_engine import Engine, LoraConfig
from tinsmith_engine.distributed.leader_commands import Leader, follow
from tinsmith_engine.distributed.process_group import Ranks
from tinsmith_runtime.errors import InvalidFieldError, RanksLostError

TOLERANCE = 2e-6
Found = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def untied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("untied"), "llama", tie_word_embeddings=False)


def life(engine: Engine) -> Found:
    """What gradients, scores and steps of several runs come to."""
    scenarios.create_runs(engine)
    requests = list(scenarios.all_requests().values())
    found = scenarios.collect(engine, requests, "trained/")
    scored = [replace(one, is_backward=False) for one in requests]
    found |= scenarios.collect(engine, scored, "scored/")
    engine.optim_steps([(name, scenarios.ADAM) for name, *_ in scenarios.TENANTS])
    for name, *_ in scenarios.TENANTS:
        found[f"stepped/{name}"] = engine.export_state(name).tensors["theta"]
    return found


@pytest.mark.parametrize(
    ("is_tied", "shard_base"),
    [
        pytest.param(True, True, id="sharded"),
        pytest.param(False, True, id="sharded-with-a-head-of-its-own"),
        pytest.param(True, False, id="replicated"),
    ],
)
def test_ranks_compute_what_one_process_does(
    qwen3_dir: Path, untied_dir: Path, is_tied: bool, shard_base: bool
) -> None:
    model_dir = qwen3_dir if is_tied else untied_dir

    def run(ranks: Ranks) -> Found:
        engine = scenarios.load(ranks, model_dir, shard_base=shard_base, exact=False)
        found: Found = {}
        with scenarios.leading(ranks, engine) as leads:
            if leads:
                found = life(engine)
        # A follower holds the same.
        state = {name: engine.export_state(name).tensors["theta"] for name in engine.runs()}
        return found | {f"held/{name}": theta for name, theta in state.items()}

    first, second = run_as_threads(run)
    alone = Engine.load(
        model_dir,
        micro_batch_tokens=scenarios.MICRO_BATCH_TOKENS,
        max_resident_runs=8,
        exact=False,
    )
    for name, wanted in life(alone).items():
        tolerance = 1e-4 if name.startswith("stepped/") else TOLERANCE
        assert relative_error(first[name], wanted) <= tolerance, name
    assert second
    for name, held in second.items():
        assert torch.equal(held, first[name]), name


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(MemoryError("can't allocate memory"), "OutOfMemoryError"), (ValueError(), "InternalError")],
)
def test_a_pass_that_fails_on_one_rank_has_failed_on_all(
    qwen3_dir: Path, error: Exception, outcome: str
) -> None:
    large = scenarios.all_requests()["large"]

    def run(ranks: Ranks) -> tuple[list[str], torch.Tensor]:
        engine = scenarios.load(ranks, qwen3_dir, shard_base=True, exact=False)
        kinds: list[str] = []
        score, model = engine.model.score, engine.model
        for fails in (True, False):

            def fail(*_: Any, **__: Any) -> Any:
                raise error

            model.score = fail if fails and ranks.rank == 1 else score  # type: ignore[method-assign]
            with scenarios.leading(ranks, engine) as leads:
                if leads:
                    if fails:
                        engine.create_run("large", LoraConfig(rank=8, seed=4))
                    kinds += [type(one).__name__ for one in engine.compute([large])]
        return kinds, engine.export_state("large").tensors["grad"]

    (kinds, first), (_, second) = run_as_threads(run)
    assert kinds == [outcome, "BatchResult"]
    alone = Engine.load(qwen3_dir, micro_batch_tokens=scenarios.MICRO_BATCH_TOKENS, exact=False)
    alone.create_run("large", LoraConfig(rank=8, seed=4))
    alone.compute([large])
    wanted = alone.export_state("large").tensors["grad"]
    assert relative_error(first, wanted) <= TOLERANCE
    assert torch.equal(first, second)


def test_ranks_that_come_to_different_results_do_not_go_on(qwen3_dir: Path) -> None:
    def run(ranks: Ranks) -> str:
        engine = scenarios.load(ranks, qwen3_dir, shard_base=False, exact=False)
        engine.create_run("small", LoraConfig(rank=8, seed=1))
        state = engine.export_state("small")
        state.has_gradient, state.version = True, ranks.rank
        state.tensors["grad"] = torch.ones_like(state.tensors["theta"])
        engine.drop_run("small")
        engine.import_state("small", state)
        try:
            with scenarios.leading(ranks, engine) as leads:
                if leads:
                    engine.optim_step("small", scenarios.ADAM)
        except RanksLostError as error:
            return error.message
        return "they go on"

    assert all("disagree about optim_step" in told for told in run_as_threads(run))


class _Failing:
    """An engine of a rank whose calls fail as they are told to, or give what they are given."""

    def perform(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "fail":
            raise ValueError(arguments[0])
        if method == "refuse":
            raise InvalidFieldError(arguments[0], "is wrong")
        return arguments[0]


def _call_all(ranks: Ranks, method: str, texts: tuple[str, str]) -> str:
    """Let a call fail on each rank with a text of its own; then make one that succeeds."""
    engine = _Failing()
    if not ranks.is_first:
        try:
            follow(ranks, {"e": engine})
        except RanksLostError:
            return "lost"
        return "stopped"
    leader = Leader(ranks)
    try:
        first, second = texts
        with pytest.raises((ValueError, InvalidFieldError), match=first):
            leader.call("e", method, (second,), lambda: engine.perform(method, (first,)))
        return str(leader.call("e", "give", ("an answer",), lambda: "an answer"))
    except RanksLostError as error:
        return error.message
    finally:
        leader.stop()


@pytest.mark.parametrize("method", ["fail", "refuse"])
def test_an_error_that_all_ranks_meet_alike_fails_its_call_alone(method: str) -> None:
    found = run_as_threads(lambda ranks: _call_all(ranks, method, ("a", "a")))
    assert found == ["an answer", "stopped"]


@pytest.mark.parametrize("method", ["fail", "refuse"])
def test_ranks_that_fail_with_different_errors_do_not_go_on(method: str) -> None:
    told, follower = run_as_threads(lambda ranks: _call_all(ranks, method, ("a", "b")))
    assert f"disagree about {method}" in told
    assert follower == "lost"


def test_a_rank_alone_needs_no_other() -> None:
    ranks = Ranks.start(rank=0, world_size=1)
    assert (ranks.is_first, ranks.is_alone) == (True, True)
    assert ranks.broadcast(b"m", "tag") == b"m"
    assert ranks.broadcast(None, "tag") == b""
    assert ranks.all_gather(b"m", "tag") == [b"m"]
    ranks.meet()
    ranks.close()
