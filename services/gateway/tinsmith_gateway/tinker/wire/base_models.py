"""Names of base models: further names may stand for one that is served."""

from __future__ import annotations

from collections.abc import Mapping


class BaseModels:
    """The names of one deployment.

    Args:
        aliases: The base model behind each further name.
        tokenizer_ids: What the tokenizer of a base model is loaded by, where that is not its name.
    """

    def __init__(self, aliases: Mapping[str, str], tokenizer_ids: Mapping[str, str]) -> None:
        self._aliases = dict(aliases)
        self._tokenizer_ids = dict(tokenizer_ids)

    def tokenizer_id(self, base_model: str) -> str:
        """Return what a client loads the tokenizer of a base model by: a hub id or a directory."""
        return self._tokenizer_ids.get(base_model, base_model)

    def resolve(self, name: str) -> str:
        """Return the base model that a name stands for."""
        return self._aliases.get(name, name)

    def names(self, base_model: str) -> list[str]:
        """Return all names of a base model, its own first."""
        further = [alias for alias, behind in self._aliases.items() if behind == base_model]
        return [base_model, *sorted(further)]
