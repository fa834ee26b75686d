"""What `environment=` names, in recipes, `tinsmith eval` and `client.environments.play` alike.

A word without a colon names a served environment. `FILE.py:CLASS` and `MODULE:CLASS` name a class,
which plays in this process. `grpc://HOST:PORT[/NAME]` names a server that was started by
`tinsmith env serve`, whether the scheduler knows it or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tinsmith.addresses import normalize_address
from tinsmith.environments.environment import Environment
from tinsmith.errors import ConfigurationError
from tinsmith.names import EnvironmentName, is_valid_id
from tinsmith.user_code import load_object, names_code

FORMS = "give a served name, FILE.py:CLASS, MODULE:CLASS, or grpc://HOST:PORT[/NAME]"
"""Ends each error about a value that names none."""
_SCHEME = "grpc://"


@dataclass(frozen=True, slots=True)
class NamedEnvironment:
    """An environment that was named.

    Attributes:
        given: What was given, or how a class that was given as such is named.
        environment_class: Plays in this process; None where a server does.
        address: `host:port` of a server of its own; empty for what the scheduler knows.
        name: Id or resource name of a served one; empty for the only one of an address.
    """

    given: str
    environment_class: type[Environment] | None = None
    address: str = ""
    name: str = ""

    @property
    def is_at_scheduler(self) -> bool:
        """Whether other pods find it by its name."""
        return self.environment_class is None and not self.address


AnyEnvironment: TypeAlias = str | type[Environment] | NamedEnvironment
"""A word, a class, or what `Client.environments.find` returned."""


def read_environment(given: str | type[Environment], setting: str) -> NamedEnvironment:
    """Return what a value names; a class is imported, and no server is asked.

    Args:
        given: One of the forms of this module, or a class.
        setting: What the value is called in an error.

    Raises:
        ConfigurationError: If it has none of the forms, or the class cannot be had.
    """
    if not isinstance(given, str):
        named = f"{given.__module__}:{given.__qualname__}" if isinstance(given, type) else ""
        return NamedEnvironment(named, _checked(given, named or repr(given), setting))
    if "://" in given:
        address, name = _read_address(given, setting)
        return NamedEnvironment(given, address=address, name=name)
    if names_code(given):
        return NamedEnvironment(given, _checked(load_object(given, setting), given, setting))
    if not is_valid_id(given.rpartition("/")[2]):
        raise _wrong(given, setting, "")
    return NamedEnvironment(given, name=given)


def choose_served(
    named: NamedEnvironment, served: Mapping[str, bool], setting: str
) -> NamedEnvironment:
    """Return a served environment that is there, with its resource name.

    Args:
        named: What was named.
        served: Resource names of what the server plays, and whether each server plays it.
        setting: What the value is called in an error.

    Raises:
        ConfigurationError: If it is not there; names what is. If an address alone is given, and its
            server was started with several environments, or with none.
    """
    names = {EnvironmentName.parse(name).environment: name for name in served}
    known = ", ".join(sorted(names)) or "none"
    if named.name:
        name = names.get(named.name.rpartition("/")[2], "")
        if not name or ("/" in named.name and name != named.name):
            why = f", and no environment of this name is served; served are {known}"
            raise _wrong(named.given, setting, why)
        return replace(named, name=name)
    own = [name for name, is_builtin in served.items() if not is_builtin]
    if len(own) != 1:
        what = "which of those served is meant is not said" if served else "where none is served"
        raise ConfigurationError(
            f"{setting} is {named.given!r}, {what}; there are: {known}",
            remedy=f"name one of them: {named.given.rstrip('/')}/NAME",
        )
    [name] = own
    return replace(named, given=f"{named.given.rstrip('/')}/{name.rpartition('/')[2]}", name=name)


def _read_address(given: str, setting: str) -> tuple[str, str]:
    """Return host and port, and a name or nothing."""
    place = given.removeprefix(_SCHEME)
    if place == given:
        raise _wrong(given, setting, ", which is no address of an environment server")
    host, slash, name = place.partition("/")
    if slash and name and not is_valid_id(name):
        raise _wrong(given, setting, f", and {name!r} is no name of an environment")
    try:
        return normalize_address(host, name=setting), name
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{setting} is {given!r}, which is no address", remedy=FORMS
        ) from error


def _checked(made: Any, word: str, setting: str) -> type[Environment]:
    if not isinstance(made, type) or not issubclass(made, Environment):
        raise ConfigurationError(
            f"{setting}: {word} is no environment",
            remedy="derive it from tinsmith.environments.environment.Environment, or " + FORMS,
        )
    return made


def _wrong(given: str, setting: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{setting} is {given!r}{why}", remedy=FORMS)
