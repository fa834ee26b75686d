"""Which runs this trainer holds: adoption by epoch, the lease on a shared ledger, and retention.

The registry that accepts operations lives here, since only an owner may accept. No engine call.
"""
