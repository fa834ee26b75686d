"""Which runs hold a slot of the engine, and how state moves between engine, host memory and store.

Owns the resident state of runs and the weights that samplers read. Does not choose operations
(`cycle`) and does not decide which trainer holds a run (`ownership`).
"""
