"""The embedded server: every pod wired into one process, and the tiny model that it can serve."""
