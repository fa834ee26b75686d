"""The sampler pod: completions and scores from base models, checkpoints and live runs."""
