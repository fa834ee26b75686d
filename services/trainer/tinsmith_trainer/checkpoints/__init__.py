"""Named checkpoints: their records and files, transfers, expiry, and the audit trail.

Works on the ledger and the object store alone, so it also serves checkpoints of runs that no
trainer holds. Nothing here touches the engine.
"""
