"""Training jobs of a project: submitted, watched, cancelled."""
