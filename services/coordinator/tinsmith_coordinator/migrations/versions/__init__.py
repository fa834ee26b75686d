"""Migrations of the scheduler's tables; see `tinsmith_runtime.sql.versions`."""
