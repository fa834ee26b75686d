"""Weights on disk: safetensors checked before they are read, and models from a folder or a hub."""
