"""The packed decoder: layers with their backward, LM head, vision, compiled operations.

A forward and backward over packed tokens; knows neither runs nor operations.
"""

# Axes of the tensors in this folder, each with what it counts. Words in a shape mean themselves.
#   N  token rows of a pass or of a decode step     H    numbers of a hidden state
#   T  tokens of one sequence                       D    numbers of one head
#   S  sequences of a bucket                        Hq   query heads
#   L  tokens that the bucket pads a sequence to    Hkv  key heads, as many as value heads
#   K  targets of a token                           G    query heads of one key head
#   V  tokens of the vocabulary                     I    numbers between the products of an MLP
#   E  experts of a layer                           P    numbers of a slot
#   M  in `experts.py` pairs of token and expert,   R    runs of an adapter group
#      in `lm_head.py` rows that are scored
#   B  products of a stack                          Q    queries of one product
#   n, c  rows of one chunk of M
