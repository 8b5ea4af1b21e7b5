"""Vision transformers that many tasks share, and that trade tokens for time (OTAS)."""
