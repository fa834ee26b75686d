"""Tests with a real Prometheus or its checker of rules, from Debian's package `prometheus`."""
