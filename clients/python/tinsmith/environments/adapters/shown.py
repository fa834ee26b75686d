"""What adapters show alike: what a `render` returned, and that a text holds no action."""

from __future__ import annotations

from typing import Any

from tinsmith.environments.environment import Observation, StepResult
from tinsmith.images import ImageChunk


def as_observation(shown: Any, before: str = "") -> Observation:
    """Return what a `render` returned as an observation, behind a text."""
    if isinstance(shown, Observation):
        return shown
    if isinstance(shown, str):
        return Observation.of_user("\n".join(filter(None, (before, shown))))
    parts = [{"type": "text", "text": before}] if before else []
    texts = [each for each in shown if not isinstance(each, ImageChunk)]
    images = [each for each in shown if isinstance(each, ImageChunk)]
    return Observation.of_user([*parts, *texts], images)


def refuse_action(error: ValueError, reward: float) -> StepResult:
    """Return the step of a text that holds no action: the model is told what is wanted."""
    told = Observation.of_user(f"This is no action: {error}")
    return StepResult(told, reward, False, {"invalid_action": str(error)})
