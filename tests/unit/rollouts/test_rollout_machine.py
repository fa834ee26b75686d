from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.rollouts import (
    Cancelled,
    ContextBuilt,
    Continuation,
    EnvironmentFailed,
    Event,
    InvalidTransitionError,
    ParseFailed,
    Rollout,
    RolloutConfig,
    RolloutState,
    StepTaken,
    TerminationReason,
    TurnSampled,
)


def sampled(num_tokens: int = 2) -> TurnSampled:
    return TurnSampled([5] * num_tokens, [-0.5] * num_tokens, [1] * num_tokens, "stop")


def step(done: bool = False, num_tokens: int = 3, reward: float = 0.0) -> StepTaken:
    return StepTaken(reward, done, {}, None if done else Continuation((7,) * num_tokens))


def play(config: RolloutConfig, *events: Event) -> Rollout:
    rollout = Rollout(config)
    for event in events:
        rollout.apply(event)
    return rollout


BEGIN = ContextBuilt([1, 2, 3])


@pytest.mark.parametrize(
    ("config", "events", "reason"),
    [
        pytest.param(RolloutConfig(), [BEGIN, sampled(), step(True)], "DONE", id="done"),
        pytest.param(
            RolloutConfig(max_turns=1), [BEGIN, sampled(), step()], "MAX_TURNS", id="turns"
        ),
        pytest.param(
            RolloutConfig(max_tokens=2), [BEGIN, sampled(), step()], "MAX_TOKENS", id="tokens"
        ),
        pytest.param(
            RolloutConfig(max_tokens=2), [BEGIN, sampled(), step(True)], "DONE", id="done-first"
        ),
        pytest.param(
            RolloutConfig(max_context_tokens=8),
            [BEGIN, sampled(), step()],
            "CONTEXT_FULL",
            id="context",
        ),
        pytest.param(
            RolloutConfig(max_context_tokens=3), [BEGIN], "CONTEXT_FULL", id="context-at-once"
        ),
        pytest.param(
            RolloutConfig(), [BEGIN, sampled(), ParseFailed("?")], "PARSE_ERROR", id="parse"
        ),
        pytest.param(
            RolloutConfig(),
            [BEGIN, sampled(), EnvironmentFailed("!")],
            "ENVIRONMENT_FAILED",
            id="environment",
        ),
        pytest.param(
            RolloutConfig(), [EnvironmentFailed("!")], "ENVIRONMENT_FAILED", id="environment-reset"
        ),
        pytest.param(RolloutConfig(), [Cancelled()], "CANCELLED", id="cancelled-pending"),
        pytest.param(RolloutConfig(), [BEGIN, Cancelled()], "CANCELLED", id="cancelled"),
    ],
)
def test_reasons(config: RolloutConfig, events: list[Event], reason: str) -> None:
    rollout = play(config, *events)
    assert rollout.state is RolloutState.TERMINATED
    assert rollout.reason is TerminationReason[reason]


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([sampled()], id="turn-before-context"),
        pytest.param([BEGIN, step()], id="step-before-turn"),
        pytest.param([BEGIN, BEGIN], id="two-contexts"),
        pytest.param([BEGIN, sampled(), sampled()], id="two-turns"),
        pytest.param([BEGIN, sampled(), step(True), sampled()], id="after-the-end"),
        pytest.param([BEGIN, sampled(), StepTaken(0.0, False)], id="nothing-follows"),
        pytest.param([BEGIN, sampled(0)], id="empty-turn"),
        pytest.param([BEGIN, TurnSampled([1], [], [1], "stop")], id="no-logprobs"),
    ],
)
def test_impossible_events_are_refused(events: list[Event]) -> None:
    with pytest.raises(InvalidTransitionError):
        play(RolloutConfig(), *events)


def test_a_turn_over_its_budget_is_refused() -> None:
    with pytest.raises(InvalidTransitionError, match="1 to 2 tokens"):
        play(RolloutConfig(max_tokens_per_turn=2), BEGIN, sampled(3))


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6),
    st.integers(4, 40),
)
def test_a_trajectory_ends_with_a_sampled_token(
    turns: list[tuple[int, int]], max_context_tokens: int
) -> None:
    rollout = Rollout(RolloutConfig(max_turns=6, max_context_tokens=max_context_tokens))
    rollout.apply(BEGIN)
    num_sampled = 0
    for num_tokens, num_shown in turns:
        if rollout.reason is not None:
            break
        num_tokens = min(num_tokens, rollout.turn_budget)
        num_sampled += num_tokens
        rollout.apply(sampled(num_tokens))
        rollout.apply(step(num_tokens=num_shown))
        assert rollout.reason is not None or rollout.turn_budget > 0
    if rollout.reason is None:
        rollout.apply(Cancelled())
    else:
        assert rollout.to_trajectory().samples[-1].loss_mask[-1]
    (sample,) = rollout.to_trajectory().samples
    assert sample.num_trained_tokens == num_sampled
    assert len(sample.tokens) <= max_context_tokens
    assert not (sample.logprobs[~sample.loss_mask]).any()


def test_config_is_validated() -> None:
    with pytest.raises(ValueError, match="max_turns"):
        RolloutConfig(max_turns=0)
    with pytest.raises(ValueError, match="exclude"):
        RolloutConfig(split_turns=True, append_only=True)
