"""Environments of verifiers: their own loop runs, and each call of its model is a turn of ours.

    VerifiersEnvironment("my-env", split="train")

It is an `Environment` like any other: played in the client, or named by the settings of a server as
`sums=verifiers:my-env`. A subclass with an `env_id` of its own needs no arguments. Prompts, tools,
users, stops and rewards are those of verifiers, since its own episode runs in this process, in
a thread. Only the model is replaced: verifiers is given the address of an endpoint, which waits for
the player's turn.

What cannot be played turn by turn is refused by name: several players, seats that count tokens, and
harnesses that speak another API than chat completions, or change what the model has read.
"""

from __future__ import annotations

import importlib
import re
import urllib.request
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

from tinsmith.environments.adapters import verifiers_tasks
from tinsmith.environments.adapters.chat_dialogue import ChatDialogue, DialogueError
from tinsmith.environments.adapters.chat_endpoint import ChatEndpoint, Ended, Refused
from tinsmith.environments.adapters.deadlines import Deadline
from tinsmith.environments.adapters.failures import EpisodeFailedError
from tinsmith.environments.adapters.verifiers_episode import BackgroundEpisode, VerifiersOutcome
from tinsmith.environments.adapters.verifiers_harness import register
from tinsmith.environments.environment import (
    TEXT,
    TOOL_CALLS,
    Action,
    Environment,
    InvalidSettingError,
    JsonValue,
    Observation,
    StepResult,
)
from tinsmith.environments.plain_values import to_plain
from tinsmith.errors import ConfigurationError

EPISODE_TIMEOUT_S = 55.0
"""What verifiers may take between two turns; a little below what a server gives a step."""
_LOOPBACK = "127.0.0.1"
_BY_SEED = -1
_OLDEST = (0, 4)
_PLAIN_HARNESS = "bash"
"""What verifiers plays where nothing names a harness."""
_TOKEN_LIMITS = ("max_input_tokens", "max_output_tokens", "max_total_tokens")


class VerifiersEnvironment(Environment):
    """One episode of an environment of verifiers, 0.4.0 or newer.

    Args:
        env: The id of its taskset; the settings of its config, an `EnvConfig`, or an `Env`.
        harness: Settings of the program that plays; a loop of chat in this process by default,
            where the environment names none.
        runtime: Settings of where that program runs; this machine by default, where the environment
            names no other.
        timeout_s: What verifiers may take between two turns, the loading of its tasks included.
        **taskset: Settings of the taskset, where `env` is an id.

    Example:
        >>> make = partial(VerifiersEnvironment, "gsm8k-v1")
        >>> runner.run(lambda: create_local_instance(make, seed=3))
    """

    env_id: ClassVar[str] = ""
    """What a subclass plays where it is built without arguments."""
    description = "an environment of verifiers"
    default_config: ClassVar[Mapping[str, JsonValue]] = {"index": _BY_SEED, "taskset": {}}
    """`index`: the task; -1 has the seed choose. `taskset`: further settings of the taskset."""
    action_kinds = frozenset({TEXT, TOOL_CALLS})

    def __init__(
        self,
        env: Any = None,
        *,
        harness: Mapping[str, Any] | None = None,
        runtime: Mapping[str, Any] | None = None,
        timeout_s: float = EPISODE_TIMEOUT_S,
        **taskset: Any,
    ) -> None:
        self._vf = _import_verifiers()
        _check_proxies()
        env = env if env is not None else self.env_id
        if not env:
            raise ConfigurationError(
                "no environment of verifiers is named", remedy="give its id, or set env_id"
            )
        self._timeout_s = timeout_s
        self._loaded = env if isinstance(env, self._vf.Env) else None
        self._config = self._read_config(env, taskset)
        self._seat = _player_seat(self._config)
        self._config = self._fill_seat(harness, runtime)
        self._dialogue = ChatDialogue()
        self._endpoint: ChatEndpoint | None = None
        self._episode: BackgroundEpisode | None = None

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        """Begin the episode of the task that the seed, or `index`, chooses."""
        deadline = Deadline(self._timeout_s)
        index = config.get("index", _BY_SEED)
        if isinstance(index, bool) or not isinstance(index, int | float) or index != int(index):
            raise InvalidSettingError("index", f"must be a whole number, got {index!r}")
        env, task = self._load(config.get("taskset") or {}, seed, int(index), deadline)
        self._endpoint = ChatEndpoint()
        self._episode = BackgroundEpisode(env, task, self._endpoint)
        shown = self._next(deadline)
        if isinstance(shown, VerifiersOutcome):
            raise EpisodeFailedError(
                f"{self._name} ended before the model had a turn: {shown.info['stop_condition']}"
            )
        return shown

    def step(self, action: Action) -> StepResult:
        """Give verifiers what the model said; the reward comes with the last turn."""
        if self._endpoint is None:
            raise RuntimeError("the episode has not begun")
        self._endpoint.answer(self._dialogue.answer(action))
        shown = self._next(Deadline(self._timeout_s))
        if isinstance(shown, VerifiersOutcome):
            return StepResult(Observation(), shown.reward, True, to_plain(shown.info))
        return StepResult(shown, 0.0, False)

    def close(self) -> None:
        """End the episode, and what verifiers started for it."""
        if self._endpoint is not None:
            self._endpoint.close()
        if self._episode is not None:
            self._episode.stop()

    @property
    def _name(self) -> str:
        return str(self._config.env_id)

    def _load(self, given: Any, seed: int, index: int, deadline: Deadline) -> tuple[Any, Any]:
        """Return the `Env` of this episode, and its task."""

        def load() -> tuple[Any, Any]:
            env = self._make_env(given)
            self._check_place(env)
            return env, verifiers_tasks.choose(env.taskset, seed, index)

        try:
            return deadline.run(load, "verifiers-loading")
        except TimeoutError as error:
            raise EpisodeFailedError(
                f"{self._name} took over {self._timeout_s:g} s to load its tasks; it goes on, and "
                "a later episode finds them"
            ) from error

    def _next(self, deadline: Deadline) -> Observation | VerifiersOutcome:
        """Return what the model is shown next, or how the episode ended."""
        assert self._endpoint is not None
        try:
            event = self._endpoint.next(deadline.left_s())
        except TimeoutError:
            raise EpisodeFailedError(
                f"{self._name} took over {self._timeout_s:g} s between two turns; a tool server "
                "that does not start is waited for as long, and its module has to be found by a "
                "process of its own (PYTHONPATH, or an installed package)"
            ) from None
        if isinstance(event, Ended):
            if isinstance(event.outcome, BaseException):
                problem = f"{type(event.outcome).__name__}: {event.outcome}"
                raise EpisodeFailedError(f"{self._name} failed: {problem}") from event.outcome
            return VerifiersOutcome.read(event.outcome, self._seat, self._name)
        if isinstance(event, Refused):
            raise self._unplayable(event.problem)
        try:
            return self._dialogue.observe(event.request)
        except DialogueError as error:
            raise self._unplayable(str(error)) from error

    def _unplayable(self, problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"the environment {self._name} of verifiers cannot be played turn by turn: {problem}",
            remedy="choose a harness that appends to one conversation by chat completions, such as "
            "the default one",
        )

    def _check_place(self, env: Any) -> None:
        """Refuse what needs a container and has none, before anything is started."""
        spec = getattr(self._config, self._seat)
        if spec.runtime.type != "subprocess":
            return
        harness = type(self._vf.load_harness(spec.harness))
        for needy in (type(env.taskset).task_type(), harness):
            if needy.NEEDS_CONTAINER:
                raise ConfigurationError(
                    f"the environment {self._name} of verifiers needs a container for its "
                    f"{needy.__name__}, and its runtime is a process of this machine",
                    remedy="give runtime={'type': 'docker'}, or another kind that verifiers has",
                )

    def _read_config(self, env: Any, taskset: Mapping[str, Any]) -> Any:
        """Return the `EnvConfig` of what was given."""
        if self._loaded is not None or isinstance(env, self._vf.EnvConfig):
            if taskset:
                raise ConfigurationError(
                    f"settings of the taskset are given beside a config: {', '.join(taskset)}",
                    remedy="set them in the config",
                )
            return env.config if self._loaded is not None else env
        raw = {"taskset": {"id": env, **taskset}} if isinstance(env, str) else dict(env)
        try:
            return self._vf.resolve_env_config(raw)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"verifiers makes no environment of {env!r}: {error}",
                remedy="check the id and the settings; its package has to be installed",
            ) from error

    def _fill_seat(
        self, harness: Mapping[str, Any] | None, runtime: Mapping[str, Any] | None
    ) -> Any:
        """Return the config whose player has a program, and a place for it."""
        spec = getattr(self._config, self._seat)
        given: dict[str, Any] = {}
        if harness is not None or spec.harness is None:
            given["harness"] = dict(harness or {"id": self._default_harness()})
        if runtime is not None or "runtime" not in spec.model_fields_set:
            given["runtime"] = dict(runtime or {"type": "subprocess"})
        if not given:
            return self._config
        try:
            filled = type(spec).model_validate({**spec.model_dump(exclude_unset=True), **given})
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"verifiers refuses the harness or the runtime of {self._name}: {error}",
                remedy="correct harness= and runtime=",
            ) from error
        return self._config.model_copy(update={self._seat: filled})

    def _default_harness(self) -> str:
        """Return the harness that the taskset bundles; a loop of chat where it bundles none."""
        found = str(self._vf.default_harness_id(self._config.taskset.id))
        return register() if found == _PLAIN_HARNESS else found

    def _make_env(self, given: Any) -> Any:
        """Return an `Env` of this episode; one that serves belongs to one event loop."""
        if not isinstance(given, Mapping):
            raise InvalidSettingError("taskset", f"must be an object, got {given!r}")
        config = self._config
        if given:
            taskset = config.taskset
            try:
                changed = type(taskset).model_validate({**taskset.model_dump(), **given})
            except ValueError as error:
                raise InvalidSettingError("taskset", f"is refused by verifiers: {error}") from error
            config = config.model_copy(update={"taskset": changed})
        try:
            if self._loaded is None:
                return self._vf.load_environment(config)
            env = type(self._loaded)(config)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"verifiers loads no environment {self._name}: {error}",
                remedy="check its config with `vf-eval` of verifiers",
            ) from error
        if not given:
            # Views such as `take` and `shuffle` belong to the object.
            env.taskset = self._loaded.taskset
        return env


def _import_verifiers() -> Any:
    try:
        vf = importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise ConfigurationError(
            "environments of verifiers need verifiers, 0.4.0 or newer, which is not installed",
            remedy="pip install 'verifiers>=0.4'",
        ) from error
    found = re.match(r"(\d+)\.(\d+)", version("verifiers"))
    if found is None or (int(found[1]), int(found[2])) < _OLDEST:
        raise ConfigurationError(
            f"the installed verifiers is {version('verifiers')}, and environments of 0.4.0 and "
            "newer are played",
            remedy="pip install 'verifiers>=0.4', and load a taskset in place of an environment of "
            "`load_environment`",
        )
    return vf


def _check_proxies() -> None:
    """Refuse a proxy for the loopback, where verifiers calls its model and its tools."""
    proxies = urllib.request.getproxies()
    if proxies.keys() & {"http", "all"} and not urllib.request.proxy_bypass(_LOOPBACK):
        raise ConfigurationError(
            "environments of verifiers call this machine over HTTP, and the variables of the "
            "process send such calls to a proxy",
            remedy=f"set NO_PROXY={_LOOPBACK}, beside what it names already",
        )


def _player_seat(config: Any) -> str:
    """Return the agent of an environment that the player is: the one without a model of its own.

    Raises:
        ConfigurationError: If there are several, or it counts tokens, samples or begins anew.
    """
    agents: Any = importlib.import_module("verifiers.v1.configs.agent")
    seats = agents.agent_config_fields(config)
    free = [name for name, spec in seats.items() if spec.client is None or spec.model is None]
    if len(free) != 1:
        raise ConfigurationError(
            f"the environment {config.env_id} of verifiers has {len(free)} agents without a model "
            f"of their own ({', '.join(free) or 'none'}), and one is played",
            remedy="give each other agent a `client` and a `model`: "
            "env={'taskset': {...}, 'judge': {'client': {...}, 'model': ...}}",
        )
    seat = str(free[0])
    retries = seats[seat].retries
    if retries.max_retries or retries.rules:
        raise ConfigurationError(
            f"the agent {seat} of {config.env_id} sets retries, and an episode that failed is "
            "played again by the rollout",
            remedy="leave them out",
        )
    counted = [name for name in _TOKEN_LIMITS if getattr(seats[seat], name) is not None]
    if counted:
        raise ConfigurationError(
            f"the agent {seat} of {config.env_id} sets {', '.join(counted)}, and tokens are "
            "counted by the rollout",
            remedy="leave it out, and set RolloutConfig(max_tokens_per_turn=...)",
        )
    sampling = seats[seat].sampling
    settings = sampling.model_dump(exclude_none=True) if sampling is not None else {}
    sampled = sorted(settings.keys() - {"stop"})
    if sampled:
        raise ConfigurationError(
            f"the agent {seat} of {config.env_id} sets the sampling of {', '.join(sampled)}, and "
            "the rollout samples",
            remedy="leave it out, and set RolloutConfig(temperature=...) and the like",
        )
    return seat
