"""API keys of a project."""
