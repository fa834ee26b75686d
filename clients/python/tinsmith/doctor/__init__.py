"""What is wrong with a machine, a server or a cluster, and what to do: checks and their findings.

A check looks at one thing and changes nothing. Each is a function of what it looks at, so that a
test can plant the fault.
"""
