"""What a training will take, before it starts: memory, time and devices, from shapes alone.

Nothing here loads a model or asks a server.
"""
