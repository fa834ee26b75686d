"""The wire of the environment: servicer and codecs.

The only folder that may import grpc and the generated stubs.
"""
