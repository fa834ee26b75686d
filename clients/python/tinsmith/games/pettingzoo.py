"""Games of PettingZoo as ours: played at tables, in matches and in self-play.

Both kinds fit: agents that move one after the other (AEC), and all at once (parallel). The seed is
that of the environment, so the same moves lead every copy to the same position. A text that holds
no legal move forfeits the game, as in our own games: the others must not wait for a better one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinsmith.environments.adapters import spaces
from tinsmith.environments.environment_calls import Observation

Render = Callable[[Any, str, Any], str]
"""Returns what an agent is shown of the environment, by its name there and its observation."""
Parse = Callable[[str, Any, str], Any]
"""Returns the move of a text, by the environment and the agent's name there; raises `ValueError`
where it holds none."""

MASK = "action_mask"
"""The entry of an observation that says which moves are legal."""


class PettingZooGame:
    """One game of an environment of PettingZoo; an `AgentGame`.

    Args:
        env: An AEC or a parallel environment, of this game alone.
        agents: Names of the seats, in the order of the environment's agents; its own by default.
        seed: Of the environment; equal seeds begin equal games.
        render: Returns what an agent is shown; its observation as text by default.
        parse: Returns the move of a text; by the agent's action space by default.
        forfeit_reward: What a text without a legal move costs its agent.

    Raises:
        ValueError: If there are more or fewer seats than agents.

    Example:
        >>> game = PettingZooGame(connect_four_v3.env(), ("black", "white"), seed=3)
        >>> runner.run(lambda: sit_down(game, "black", {"white": my_script}))
    """

    def __init__(
        self,
        env: Any,
        agents: Sequence[str] | None = None,
        *,
        seed: int = 0,
        render: Render | None = None,
        parse: Parse | None = None,
        forfeit_reward: float = -1.0,
    ) -> None:
        self.env = env
        self._is_parallel = not hasattr(env, "agent_selection") and not hasattr(env, "agent_iter")
        reset = env.reset(seed=seed)
        self._observations: Mapping[str, Any] = reset[0] if self._is_parallel else {}
        own = list(env.possible_agents)
        names = list(agents) if agents is not None else [str(each) for each in own]
        if len(names) != len(own) or len(set(names)) != len(names):
            raise ValueError(f"{names} are no names of the {len(own)} agents {own}")
        self._own = dict(zip(names, own, strict=True))
        self._names = {theirs: ours for ours, theirs in self._own.items()}
        self._render = render
        self._parse = parse
        self._forfeit_reward = forfeit_reward
        self._rewards = dict.fromkeys(names, 0.0)
        self.forfeited_by = ""
        """The agent whose text held no legal move; empty while there is none."""
        self._skip_ended()

    @property
    def next_agents(self) -> tuple[str, ...]:
        """Agents that move now; none once the game is over."""
        if self.forfeited_by or not self.env.agents:
            return ()
        if self._is_parallel:
            return tuple(self._names[each] for each in self.env.agents)
        return (self._names[self.env.agent_selection],)

    @property
    def rewards(self) -> Mapping[str, float]:
        """What the game has been worth to each agent so far."""
        return dict(self._rewards)

    def observe(self, agent: str) -> Observation:
        """Return what an agent that is about to move is shown; nothing once the game is over."""
        if agent not in self.next_agents:
            return Observation()
        own = self._own[agent]
        seen = self._seen(own)
        if self._render is not None:
            text = self._render(self.env, own, seen)
        else:
            text = f"{spaces.show(seen)}\nAnswer with {spaces.describe(self._space(own))}."
        return Observation(messages=[{"role": "user", "content": text}])

    def apply(self, actions: Mapping[str, Any]) -> None:
        """Make the moves of one turn.

        Raises:
            ValueError: If the game is over, or it is the turn of others.
        """
        if set(actions) != set(self.next_agents) or not actions:
            raise ValueError(f"{list(self.next_agents)} move now, not {list(actions)}")
        moves = {}
        for agent in self.next_agents:
            try:
                moves[self._own[agent]] = self._read(str(actions[agent]), self._own[agent])
            except ValueError:
                self.forfeited_by = agent
                self._rewards[agent] += self._forfeit_reward
                return
        if self._is_parallel:
            self._observations, rewards, *_ = self.env.step(moves)
            self._earn(rewards)
            return
        [move] = moves.values()
        self.env.step(move)
        self._earn(self.env.rewards)
        self._skip_ended()

    def _skip_ended(self) -> None:
        """Step over agents that are out of a game whose agents move one after the other."""
        if self._is_parallel:
            return
        env = self.env
        while env.agents and (
            env.terminations[env.agent_selection] or env.truncations[env.agent_selection]
        ):
            env.step(None)

    def _earn(self, rewards: Mapping[str, float]) -> None:
        for own, reward in rewards.items():
            self._rewards[self._names[own]] += float(reward)

    def _read(self, text: str, own: str) -> Any:
        if self._parse is not None:
            return self._parse(text, self.env, own)
        space = self._space(own)
        move = spaces.read(text, space)
        seen = self._seen(own, masked=False)
        is_masked = (
            isinstance(seen, Mapping) and MASK in seen and type(space).__name__ == "Discrete"
        )
        if is_masked and not seen[MASK][int(move) - int(space.start)]:
            raise spaces.UnreadableActionError(f"{move} is no legal move")
        return move

    def _seen(self, own: str, *, masked: bool = True) -> Any:
        """Return an agent's observation; with what is legal as numbers, if it says so."""
        seen = self._observations[own] if self._is_parallel else self.env.observe(own)
        if masked and isinstance(seen, Mapping) and MASK in seen:
            first = int(getattr(self._space(own), "start", 0))
            legal = [first + index for index, is_legal in enumerate(seen[MASK]) if is_legal]
            rest = {name: each for name, each in seen.items() if name != MASK}
            return {**rest, "legal": legal}
        return seen

    def _space(self, own: str) -> Any:
        return self.env.action_space(own)
