"""The loop of engine cycles: choose operations, compute them in one pass, commit their results.

The only place that commits results, and the only writer of the order in which operations end.
"""
