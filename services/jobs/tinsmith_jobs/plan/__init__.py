"""Pure plans: from a resource, what was observed of it and the time, to the actions that follow.

No clock, no client, no effect; `reconciler` carries the actions out. One policy a module.
"""
