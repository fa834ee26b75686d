"""Parameters of runs as rows of one tensor: layout, adapter targets, and AdamW over rows."""
