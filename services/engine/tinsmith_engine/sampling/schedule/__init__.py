"""Which sequences are decoded together, and in what room."""
