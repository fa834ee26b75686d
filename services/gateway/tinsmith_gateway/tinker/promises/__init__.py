"""Futures: their names, those that no other pod keeps, and what was used."""
