"""The wire of the trainer: servicers and codecs.

The only folder that may import grpc and the generated stubs. Decodes, validates, calls, encodes;
no logic of its own.
"""
