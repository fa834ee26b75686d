"""What a recipe leaves behind: its folder, log, plots, and how it resumes."""
