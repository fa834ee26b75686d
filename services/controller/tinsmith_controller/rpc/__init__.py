"""Calls of the controller to the scheduler.

The only folder of the controller that may import grpc and the generated stubs.
"""
