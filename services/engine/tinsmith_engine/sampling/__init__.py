"""Decoding: `sampler` takes requests, `token_drawing` draws, and the rooms below do the rest.

* `request`: what is asked for, and what ends a sample.
* `schedule`: which sequences are decoded together.
* `decode`: one step of all of them.
* `cache`: keys and values of what was read.
"""
