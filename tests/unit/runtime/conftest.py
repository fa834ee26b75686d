"""Shared by the tests of the runtime."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.unit.runtime.ledger_suite")
