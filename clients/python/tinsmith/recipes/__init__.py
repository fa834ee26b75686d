"""Recipes: short, readable training loops over the SDK, each with its data and its score."""
