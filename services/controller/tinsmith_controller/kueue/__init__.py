"""Kueue's part of a job's life, as pure functions: the Workload of a job, and what to do about it.

Nothing here calls the API server or reads a cache; `objects` keeps copies of Kueue's objects, and
`kueue_queueing` carries decisions out. Facts of the protocol are of Kueue 0.15 to 0.20.
"""
