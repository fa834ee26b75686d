"""Episodes over HTTP, as AgentJet's clients spell them: claim, play, end."""

from __future__ import annotations

from tinsmith_gateway.episodes.routes import routes

__all__ = ["routes"]
