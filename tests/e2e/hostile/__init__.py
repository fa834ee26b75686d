"""Manifests that mean harm, or no good: each is refused, fails or waits, and says why."""
