"""Data of the recipes: built-in tasks, their splits and scores, and files of users."""
