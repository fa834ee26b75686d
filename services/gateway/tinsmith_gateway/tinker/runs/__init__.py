"""Models: calls in the order of their numbers, as operations of the run of each."""
