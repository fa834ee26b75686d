"""Pure plans: from a resource, what was observed of it and the time, to the actions that follow.

No clock, no client, no effect. The controller's reconciler and the scheduler's local launcher carry
the actions out. One policy a module.
"""
