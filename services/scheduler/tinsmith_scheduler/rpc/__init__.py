"""The wire of the scheduler: servicers, codecs, and its calls to trainers.

The only folder that may import grpc and the generated stubs.
"""
