"""The sampler pod: completions and log-probabilities from base models, checkpoints and live runs."""
