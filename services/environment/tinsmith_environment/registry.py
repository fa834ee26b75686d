"""Which environments a pod offers.

The pod never imports the code of an environment: it knows a name and a class path, and asks a
worker process for the description and the default settings when it starts. So a class that cannot
be imported is found then, and not by the first user.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tinsmith.environments.environment import TEXT_ALONE
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.environment import JsonValue
from tinsmith_environment.workers.pool import WorkerPool
from tinsmith_runtime.errors import (
    ConfigError,
    EnvironmentFailedError,
    EnvironmentNotFoundError,
    InvalidFieldError,
)

_BUILTIN = {
    "math": "tinsmith_environment.builtin.math:MathEnvironment",
    "guessing": "tinsmith_environment.builtin.guessing:GuessingEnvironment",
}
_ADAPTERS = {
    "gymnasium": "tinsmith.environments.adapters.gymnasium:GymnasiumEnvironment",
    "openenv": "tinsmith.environments.adapters.openenv:OpenEnvEnvironment",
    "verifiers": "tinsmith.environments.adapters.verifiers:VerifiersEnvironment",
}
"""The class that plays an id of a library: `gymnasium:CartPole-v1`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSpec:
    """One environment."""

    name: str
    class_path: str
    """`module:Class`, importable in the worker processes."""
    description: str = ""
    default_config: Mapping[str, JsonValue] = field(default_factory=dict)
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    """Arguments of the class, from the settings of the pod; no request reaches them."""
    action_kinds: frozenset[str] = TEXT_ALONE
    """Kinds of actions that the class understands."""
    is_builtin: bool = False
    """Whether each pod plays it, whatever its settings name."""

    def merge_config(self, config: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Return the default config with the values of a request.

        Raises:
            InvalidFieldError: If the request names an unknown setting.
        """
        for setting in config:
            if setting not in self.default_config:
                known = ", ".join(sorted(self.default_config)) or "none"
                raise InvalidFieldError(
                    f"config.{setting[:64]}",
                    f"is not a setting of {self.name}; known are: {known}",
                )
        return {**self.default_config, **config}


class EnvironmentRegistry:
    """The environments of a pod by name."""

    def __init__(self, specs: Iterable[EnvironmentSpec] = ()) -> None:
        self._specs = {spec.name: spec for spec in specs}

    @property
    def specs(self) -> list[EnvironmentSpec]:
        """All environments, by name."""
        return [self._specs[name] for name in sorted(self._specs)]

    def add(self, spec: EnvironmentSpec) -> None:
        """Offer an environment; a later one of the same name replaces it."""
        self._specs[spec.name] = spec

    def get(self, name: str) -> EnvironmentSpec:
        """Return an environment.

        Raises:
            EnvironmentNotFoundError: If there is none of this name.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise environment_not_found(name)
        return spec


def environment_not_found(name: str) -> EnvironmentNotFoundError:
    """Return the error for an environment that is unknown or belongs to another project."""
    return EnvironmentNotFoundError(f"environment {name} does not exist", environment=name)


def modules_of(config: EnvironmentConfig) -> list[str]:
    """Return the modules of all environments, built-in and configured ones."""
    paths = {**_BUILTIN, **config.class_paths()}.values()
    return sorted({adapted(path)[0].partition(":")[0] for path in paths})


def adapted(class_path: str) -> tuple[str, dict[str, JsonValue]]:
    """Return the class that plays what a path names, and its arguments.

    An id of another library is played by its adapter; a class plays itself.
    """
    module, _, name = class_path.partition(":")
    adapter = _ADAPTERS.get(module)
    return (adapter, {"env": name}) if adapter else (class_path, {})


async def load_specs(config: EnvironmentConfig, pool: WorkerPool) -> list[EnvironmentSpec]:
    """Return the built-in and the configured environments, as their classes describe themselves.

    Raises:
        ConfigError: If a class cannot be imported, or is no environment.
    """
    specs = []
    for name, path in {**_BUILTIN, **config.class_paths()}.items():
        class_path, settings = adapted(path)
        if class_path == _BUILTIN["math"] and config.math_problems_path is not None:
            settings["problems_path"] = str(config.math_problems_path.resolve())
        try:
            found = await pool.describe(class_path)
        except EnvironmentFailedError as error:
            raise ConfigError(f"environment {name}: {error.message}") from error
        specs.append(
            EnvironmentSpec(
                name=name,
                class_path=class_path,
                description=(
                    found.description if class_path == path else f"{path}: {found.description}"
                ),
                default_config=found.default_config,
                action_kinds=found.action_kinds,
                settings=settings,
                is_builtin=_BUILTIN.get(name) == path,
            )
        )
    return specs
