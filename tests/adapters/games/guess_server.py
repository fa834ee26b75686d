"""Servers of OpenEnv on the loopback: guess_server.py KIND writes its port and serves.

`guess` has an action of one text; `move` one of two numbers; `calc` has tools by MCP.
"""

import asyncio
import socket
import sys
import time

import uvicorn
from fastmcp import FastMCP
from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient
from starlette.responses import PlainTextResponse


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str = ""


class GuessGame(Environment):
    """The seed modulo the limit has to be found."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._number = 0

    def reset(self, seed=None, episode_id=None, limit=10, **kwargs):
        self._number = (seed or 0) % limit
        return Hint(hint=f"Guess a number below {limit}.")

    def step(self, action, timeout_s=None, **kwargs):
        if action.guess == "crash":
            raise RuntimeError("the game crashed")
        if action.guess == "sleep":
            time.sleep(60)
        found = action.guess.strip() == str(self._number)
        hint = "yes" if found else "no"
        return Hint(hint=hint, reward=1.0 if found else -0.5, done=found, metadata={"said": hint})

    @property
    def state(self):
        return State()


class Move(Action):
    x: int
    y: int


class MoveGame(GuessGame):
    def step(self, action, timeout_s=None, **kwargs):
        return Hint(hint="moved", reward=float(action.x + action.y), done=True)


class CalcGame(MCPEnvironment):
    """A tool that adds; it rewards nothing itself."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("calc")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"message": "What is 2 + 3?"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and action.arguments.get("a") == 0:
            await asyncio.sleep(action.arguments["b"])
        if isinstance(action, CallToolAction) and "5" in str(observation.result):
            observation.reward = 1.0
        return observation

    @property
    def state(self):
        return State()


class GuessClient(EnvClient[Guess, Hint, State]):
    """A typed client, as environments of OpenEnv ship one."""

    def _step_payload(self, action):
        return {"guess": action.guess}

    def _parse_result(self, payload):
        hint = Hint(hint=payload["observation"]["hint"])
        return StepResult(observation=hint, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload):
        return State()


def guess_client(url):
    return GuessClient(base_url=url)


def calc_client(url):
    return MCPToolClient(base_url=url)


def private_client(url):
    return GenericEnvClient(base_url=url, headers={"X-Key": "mine"})


def sync_client(url):
    return GuessClient(base_url=url).sync()


async def private(request, call_next):
    """Answer HTTP with the key alone."""
    if request.headers.get("X-Key") != "mine":
        return PlainTextResponse("no key", 403)
    return await call_next(request)


GAMES = {
    "guess": (GuessGame, Guess, Hint),
    "move": (MoveGame, Move, Hint),
    "private": (GuessGame, Guess, Hint),
    "calc": (CalcGame, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    app = create_fastapi_app(*GAMES[sys.argv[1]], max_concurrent_envs=8)
    if sys.argv[1] == "private":
        app.middleware("http")(private)
    listening = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
