"""What a trainer keeps in memory of each run: its queue, decoded operations, and payloads.

The ground of the trainer: every other folder may import it, and it imports none of them. Nothing
here computes, takes a decision about a cycle, or knows the wire.
"""
