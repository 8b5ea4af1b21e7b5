"""The protocols that clients speak: validation, parsing and errors."""
