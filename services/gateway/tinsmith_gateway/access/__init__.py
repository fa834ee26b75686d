"""Who calls, and how much a caller may have in flight."""
