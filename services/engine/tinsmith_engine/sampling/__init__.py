"""Decoding: requests, KV and prefix caches, decode steps, token selection, prompt scores."""
