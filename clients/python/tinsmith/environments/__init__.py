"""Environments on the server: listed, instantiated, stepped."""
