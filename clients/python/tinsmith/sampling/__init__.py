"""Sampling from a base model, a checkpoint or a live run, whole or token by token."""
