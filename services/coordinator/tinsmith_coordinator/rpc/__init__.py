"""The wire of the coordinator: servicer and codecs.

The only folder that may import grpc and the generated stubs.
"""
