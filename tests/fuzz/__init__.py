"""Hostile HTTP for the gateway's Tinker wire: made by a seed, sent, and counted."""
