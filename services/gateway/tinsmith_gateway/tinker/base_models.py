"""Names of base models: further names may stand for one that is served."""

from __future__ import annotations

from collections.abc import Mapping


class BaseModels:
    """The names of one deployment.

    Args:
        aliases: The base model behind each further name.
    """

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = dict(aliases)

    def resolve(self, name: str) -> str:
        """Return the base model that a name stands for."""
        return self._aliases.get(name, name)

    def names(self, base_model: str) -> list[str]:
        """Return all names of a base model, its own first."""
        further = [alias for alias, behind in self._aliases.items() if behind == base_model]
        return [base_model, *sorted(further)]
