"""Generated from proto/tinsmith/v1 by `make proto`; never edited."""
