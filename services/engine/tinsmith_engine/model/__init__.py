"""The packed decoder: layers with their backward, LM head, vision, compiled operations.

A forward and backward over packed tokens; knows neither runs nor operations.
"""
