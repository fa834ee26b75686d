"""The engine's values in the words of the contract, shared by trainer and sampler.

The only folder of the engine that may import the generated stubs.
"""
