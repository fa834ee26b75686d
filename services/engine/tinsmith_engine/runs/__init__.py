"""Runs of an engine: rows, optimizer state, versions for samplers, PEFT import and export."""
