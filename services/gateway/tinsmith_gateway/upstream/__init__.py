"""Pods behind the gateway: their addresses, which of them owns a resource, and calls to them."""
