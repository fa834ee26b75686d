"""Checkpoints of a project: listing, sharing, copying, and their files."""
