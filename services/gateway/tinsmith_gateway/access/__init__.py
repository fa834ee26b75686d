"""The caller of a request, and how much a caller may have in flight."""
