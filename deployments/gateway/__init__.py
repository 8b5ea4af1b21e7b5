"""The HTTP front: protocols, validation, tokenization and routing."""
