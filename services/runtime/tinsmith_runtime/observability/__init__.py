"""Structured logs and Prometheus metrics that every pod has."""
