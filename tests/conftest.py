"""Fixtures and settings of all tests."""

import signal

from hypothesis import HealthCheck, settings

from tests.fakes.postgres import postgres as postgres
from tests.fakes.postgres import postgres_url as postgres_url

# No test is timed, and the same commit has the same result everywhere: a machine may be busy.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# A shell lets what runs in the background ignore Ctrl-C, which programs of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
