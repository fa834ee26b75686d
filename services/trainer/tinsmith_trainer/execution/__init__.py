"""How operations become engine calls, and how the same calls are repeated after a crash.

Slices of queues, the fair choice between projects, the numerics plan that is stored with a result,
and replay. Pure decisions and calls of the engine; no ledger writes, no wire.
"""
