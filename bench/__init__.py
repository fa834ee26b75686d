"""Benchmarks: ratios, both sides measured in one run; results as JSON and as a table."""
