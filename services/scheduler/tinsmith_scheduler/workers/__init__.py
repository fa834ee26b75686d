"""Registered workers, what they serve, and the rule by which a run is placed on one of them.

`trainer_protocol` is what the scheduler needs of a trainer, as a protocol free of any transport.
"""
