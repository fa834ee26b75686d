"""The main program of a pod: settings, logs, exit codes, and the help on its settings.

Beside it the program that fetches a file before the main program of a pod begins.
"""
