"""How long work waits before it tries again what the database or the object store refused."""

STORAGE_RETRY_S = 0.5
