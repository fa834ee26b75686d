"""Turns between projects, slots, and token buckets: what is next, and how much each may do."""
