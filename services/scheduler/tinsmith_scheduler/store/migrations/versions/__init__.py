"""Migrations of the scheduler's tables; see `tinsmith_runtime.sql.schema_versions`."""
