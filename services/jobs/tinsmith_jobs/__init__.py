"""One core for the life of a TrainingJob: its spec, status, JSON codecs, rules, and pure plans.

The controller of a cluster and the scheduler's launcher on one machine drive the same plans.
Nothing here reads a clock, a cluster or a process.
"""
