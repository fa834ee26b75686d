"""Training passes: validation of batches, microbatches, adapter groups, and the check of exactness.

`engine.Engine` is the face of a model that trainers use.
"""
