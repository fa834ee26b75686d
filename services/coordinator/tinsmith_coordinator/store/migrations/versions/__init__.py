"""Migrations of the coordinator's tables; see `tinsmith_runtime.sql.schema_versions`."""
