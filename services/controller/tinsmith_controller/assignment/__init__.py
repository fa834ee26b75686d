"""Assigns nodes to workloads: pure functions over all jobs, pools and nodes of a cluster.

Nothing here knows the API server; `assignment_snapshot` reads its objects into these types.
"""
