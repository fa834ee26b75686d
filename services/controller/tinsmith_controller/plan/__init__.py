"""The plan of a TrainerPool, which only a cluster has; that of a job is in `tinsmith_jobs`.

Pure functions: no clock, no client, no effect. `reconciler` carries the actions out.
"""
