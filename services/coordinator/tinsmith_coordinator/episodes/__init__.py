"""Episodes: registered, claimed under a lease, ended, swept, and turned into trajectories.

No grpc and no stubs.
"""
