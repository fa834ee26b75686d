"""Samples, which no other pod keeps, and the recordings that training refers to."""
