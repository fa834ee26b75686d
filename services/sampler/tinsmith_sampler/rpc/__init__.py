"""The wire of the sampler: servicer, calls to trainers, and codecs.

The only folder that may import grpc and the generated stubs.
"""
