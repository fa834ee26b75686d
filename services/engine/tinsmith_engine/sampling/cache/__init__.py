"""Keys and values of tokens that were read: blocks, tables, prompts that are known."""
