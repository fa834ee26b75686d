"""Losses and their gradients by log-probability, built in and custom.

Functions of log-probabilities and data; no model, no arena.
"""
