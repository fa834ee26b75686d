"""Runs and sessions: creation, placement attempts, migration, listing, and the reaper.

Calls trainers only through the protocol in `workers`. No grpc, no stubs.
"""
