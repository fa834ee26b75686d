"""What a job may do: the values of `spec.method.type`, and what each of them brings or needs."""

from __future__ import annotations

_GAMES = ("gomoku", "kuhn", "rock_paper_scissors")

BUILT_IN_DATA = {
    "supervised": ("pig_latin", "warm_start"),
    "rl": ("arithmetic", "small_sums", "geometry"),
    "rl_episodes": ("arithmetic",),
    "self_play": _GAMES,
    "match": _GAMES,
    "dpo": ("larger_number",),
    "distillation": ("small_sums", "arithmetic", "pig_latin"),
    "evaluate": ("arithmetic", "small_sums"),
}
"""Data that each recipe brings along; anything else has a place."""

HUB_METHODS = ("rl", "dpo", "distillation", "evaluate")
"""Those whose recipe reads data sets of the hub."""

RECIPE_METHODS = frozenset(BUILT_IN_DATA)
"""Those that are a recipe, by its name."""

METHODS = (*BUILT_IN_DATA, "custom", "serve")

SAMPLING_METHODS = frozenset({*BUILT_IN_DATA, "serve"} - {"supervised", "match"})
"""Those that need samplers of the job. A match has those of its agents, or of the job for all."""

UNTRAINED_METHODS = frozenset({"evaluate", "serve"})
"""Those that train nothing, and have no trainers."""
