"""Fixtures of all tests."""

from tests.fakes.postgres import postgres as postgres
from tests.fakes.postgres import postgres_url as postgres_url
