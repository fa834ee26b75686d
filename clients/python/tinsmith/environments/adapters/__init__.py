"""Environments of other libraries as ours: each module imports its library when it is used."""
