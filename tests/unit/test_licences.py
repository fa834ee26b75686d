"""No dependency has a licence that the project's own (Apache-2.0) cannot be distributed with."""

from __future__ import annotations

import importlib.metadata
import re

_UNSTATED = {"pyrage": "MIT, as its repository says"}
"""Distributions whose metadata has no licence, and where it is stated."""
_REFUSED = re.compile(r"\b(A?L?GPL|GNU|SSPL|BUSL|Commons Clause|proprietary)", re.IGNORECASE)


def _licence(distribution: importlib.metadata.Distribution) -> str:
    metadata = distribution.metadata
    classifiers = metadata.get_all("Classifier") or []
    found = [
        metadata["License-Expression"] or "",
        *(line for line in classifiers if line.startswith("License ::")),
        (metadata["License"] or "").partition("\n")[0],
    ]
    return "; ".join(text for text in found if text)


def test_licences_of_dependencies_are_stated_and_permissive() -> None:
    licences = {
        distribution.metadata["Name"]: _licence(distribution)
        for distribution in importlib.metadata.distributions()
    }
    assert len(licences) > 100
    unstated = {name for name, licence in licences.items() if not licence}
    assert unstated <= set(_UNSTATED)
    # Where there is a choice, it is taken.
    refused = {
        name: licence
        for name, licence in licences.items()
        if _REFUSED.search(licence) and " OR " not in licence
    }
    assert refused == {}
