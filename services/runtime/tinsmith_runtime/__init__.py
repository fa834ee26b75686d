"""What every pod shares: bootstrap, errors, credentials, ledger, storage."""
