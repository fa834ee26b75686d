"""Processes that run what a stranger wrote, within bounds of time and memory."""

from __future__ import annotations
