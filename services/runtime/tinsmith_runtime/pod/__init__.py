"""The main program of a pod: settings, logs, exit codes, and the help on its settings."""
