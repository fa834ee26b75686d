"""Environments that ship with the pod."""
