"""Training runs: creating and continuing them, their ordered calls, custom losses."""
