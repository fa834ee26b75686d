"""One decode step: linear layers of rows, attention over prompts, and the choice of tokens."""
