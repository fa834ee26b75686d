"""Forms of answers: schemas, regular expressions and tags as masks of tokens."""

from __future__ import annotations
