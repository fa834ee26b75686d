"""Calls to the server: channels, retries, futures, sessions, and the codec of values.

Everything above imports this folder; users import none of it.
"""
