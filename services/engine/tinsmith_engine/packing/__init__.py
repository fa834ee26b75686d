"""Inputs of a packed pass: sequences, image patches, and the routes of tokens to experts."""
