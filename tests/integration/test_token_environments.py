"""An environment that shows tokens and steps on tokens plays the same in all places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.servers import EmbeddedThread

import tinsmith
from tinsmith.rollouts import EnvironmentTask, RolloutConfig, trajectory_datums
from tinsmith.rollouts.records import read_records
from tinsmith.types import AdamParams, SamplingParams

CODE = '''
from tinsmith.environments.environment import Environment, Observation, StepResult


class EchoEnvironment(Environment):
    """Repeat the token that was shown last."""

    default_config = {"first": 40}
    action_kinds = frozenset({"tokens"})

    def reset(self, seed, config):
        self._shown, self._left = (config["first"] + seed, 7), 2
        return Observation(tokens=self._shown, stop=(9,))

    def step(self, action):
        assert action.text is None
        self._left -= 1
        reward = float(sum(token == self._shown[-1] for token in action.tokens))
        # What it is told is what was sampled: the next observation repeats it.
        self._shown = (action.tokens[-1], len(action.tokens))
        shown = Observation(tokens=self._shown) if self._left else Observation()
        return StepResult(shown, reward, not self._left, {"said": list(action.tokens)})
'''
LIMITS = RolloutConfig(max_turns=3, max_tokens_per_turn=5)
PARAMS = SamplingParams(temperature=1.0, seed=3)


def test_tokens_are_played_kept_and_trained_on(
    make_embedded: Callable[..., EmbeddedThread], tmp_path: Path
) -> None:
    (tmp_path / "echo_of_tokens.py").write_text(CODE)
    served = {
        "environments": "echo=echo_of_tokens:EchoEnvironment",
        "python_path": str(tmp_path),
        "num_workers": 1,
    }
    with make_embedded(environment=served).start().client() as client:
        run = client.create_lora_training_run("tiny", rank=4)
        sampler = run.sampler()
        file = f"{tmp_path / 'echo_of_tokens.py'}:EchoEnvironment"
        played = [
            client.environments.play(
                environment,
                sampler=sampler,
                seeds=range(3),
                config=LIMITS,
                params=PARAMS,
                rollouts=place,
                keep_in=tmp_path / f"{number}.jsonl",
            )
            for number, (environment, place) in enumerate(
                ((file, "client"), ("echo", "client"), ("echo", "server"))
            )
        ]
        kept = [list(read_records(tmp_path / f"{number}.jsonl")) for number in range(3)]
        for here, there, on_server in zip(*kept, strict=True):
            for other in (there, on_server):
                assert (other.tokens, other.mask, other.logprobs, other.rewards) == (
                    here.tokens,
                    here.mask,
                    here.logprobs,
                    here.rewards,
                )
            assert here.tokens[:2] == [40 + (here.origin.environment_seed or 0), 7]
            said = [
                [token for token, turn in zip(here.tokens, here.turn_indices, strict=True)
                 if turn == number]
                for number in range(2)
            ]  # fmt: skip
            assert [turn.info["said"] for turn in here.turns] == said
            begin = 2 + len(said[0])
            assert here.tokens[begin : begin + 2] == [said[0][-1], len(said[0])]
            assert here.mask == [0, 0, *[1] * len(said[0]), 0, 0, *[1] * len(said[1])]
            assert client.environments.replay(there, sampler=sampler).is_bit_equal
            assert client.environments.replay(here, sampler=sampler).is_bit_equal
        trajectories = [group.trajectories[0] for group in played[1].groups]
        data = [datum for each in trajectories for datum in trajectory_datums(each, 1.0)]
        run.forward_backward(data, "importance_sampling").result()
        run.optim_step(AdamParams(learning_rate=1e-3)).result()
        # A token that the model lacks is the fault of its episode.
        with pytest.raises(tinsmith.rollouts.NoRolloutsError, match="environment_failed"):
            client.environments.play(
                "echo",
                sampler=sampler,
                seeds=[EnvironmentTask(0, {"first": 10**6})],
                config=LIMITS,
            )
