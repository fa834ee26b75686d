"""Who is next, and how much each may do: turns between projects, slots, token buckets."""
