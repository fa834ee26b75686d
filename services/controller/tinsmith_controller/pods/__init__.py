"""Manifests of the pods of a plan: environment, volumes, allowed images, deployment settings.

Pure functions from specs to Kubernetes objects. Nothing here talks to an API server.
"""
