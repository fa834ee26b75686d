"""Matches: seats, games and barriers of several agents; `rules` decides, the rest carries out.

Imports the store and the waiters of episodes, never the rpc folder.
"""
