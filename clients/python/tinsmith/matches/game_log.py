"""The games of a match as a watch brings them to a member; wakes what waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from tinsmith.errors import TinsmithError
from tinsmith.matches.types import MatchGame, decode_game
from tinsmith.v1 import coordinator_pb2

_KEPT_EPOCHS = 1


@dataclass(slots=True)
class _Entry:
    game: MatchGame | None = None
    turns: dict[int, dict[str, str]] = field(default_factory=dict)
    """Moves as JSON by agent, by turn."""


class GameLog:
    """The games of one match. Lives in the background loop."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._changed = asyncio.Event()
        self._error: TinsmithError | None = None

    def apply(self, update: coordinator_pb2.MatchUpdate) -> None:
        """Take up what changed."""
        for turn in update.turns:
            entry = self._entries.setdefault((turn.epoch, turn.game), _Entry())
            entry.turns.setdefault(turn.turn, {})[turn.agent] = turn.action_json
        for message in update.games:
            self.note(decode_game(message))
        oldest = update.match.next_barrier.epoch - _KEPT_EPOCHS
        for key in [key for key in self._entries if key[0] < oldest]:
            del self._entries[key]
        self._tell()

    def note(self, game: MatchGame) -> None:
        """Take up how a game stands, unless more is known of it."""
        entry = self._entries.setdefault((game.epoch, game.game), _Entry())
        known = entry.game
        if known is not None and (known.state != "playing" or known.turn > game.turn):
            return
        entry.game = game
        self._tell()

    def fail(self, error: TinsmithError) -> None:
        """End all waits with an error: the seat is lost, or the match over."""
        self._error = error
        self._tell()

    async def wait_for_turn(
        self, epoch: int, game: int, turn: int
    ) -> tuple[MatchGame, Mapping[str, str]]:
        """Wait for the moves of a turn, or for the end of the game.

        Returns:
            The game, and the moves of the turn as JSON by agent; none if it ended without them.

        Raises:
            TinsmithError: If the seat is lost, or the match is over.
        """
        while True:
            changed = self._changed
            entry = self._entries.get((epoch, game), _Entry())
            if entry.game is not None:
                moves = entry.turns.get(turn, {})
                if moves and entry.game.turn > turn:
                    return entry.game, moves
                # An abandoned game shows no moves of the turn that it was abandoned in.
                if entry.game.state == "abandoned":
                    return entry.game, {}
            if self._error is not None:
                raise self._error
            await changed.wait()

    async def wait_for_begin(self, epoch: int, game: int) -> MatchGame:
        """Wait until it is known how a game stands.

        Raises:
            TinsmithError: If the seat is lost, or the match is over.
        """
        while True:
            changed = self._changed
            entry = self._entries.get((epoch, game))
            if entry is not None and entry.game is not None:
                return entry.game
            if self._error is not None:
                raise self._error
            await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
