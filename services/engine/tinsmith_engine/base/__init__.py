"""Values, devices, memory and the engine thread: what every other folder of the engine may use.

Imports no other folder.
"""
