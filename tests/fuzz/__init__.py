"""Hostile traffic for the gateway, made by a seed, sent, and counted."""
