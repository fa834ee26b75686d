"""Keys, sessions, checkpoints, downloads and traces: what is about no one model."""
