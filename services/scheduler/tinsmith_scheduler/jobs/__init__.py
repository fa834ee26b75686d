"""Training jobs: their store, and the two launchers (this machine, or a cluster).

`kubernetes_launcher` is the only module of the scheduler that may import the `kubernetes` package.
"""
