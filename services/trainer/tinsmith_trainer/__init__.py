"""The trainer pod: runs, their operations in order, their checkpoints."""
