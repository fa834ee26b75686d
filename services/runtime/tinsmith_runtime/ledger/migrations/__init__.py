"""Migrations of the ledger's tables; see `tinsmith_runtime.sql.schema_versions`."""
