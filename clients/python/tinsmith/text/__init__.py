"""Tokenizers and chat templates, rendered on this machine."""
