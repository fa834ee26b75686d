"""What a sample is asked for, and what ends it: requests, forms, stop strings."""
