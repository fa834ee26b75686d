"""The adapter to the Kubernetes API: client, informer, leader election, and the work queue.

The only folder that may import the `kubernetes` package. Knows nothing of training jobs.
"""
