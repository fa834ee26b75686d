"""Listening: one port for HTTP and gRPC, the HTTP server on it, and shutdown.

Knows no protocol above HTTP and no pod.
"""
