"""Tokens and text of sampling pods: pieces of text, stop strings, penalties, tokenizer files."""
