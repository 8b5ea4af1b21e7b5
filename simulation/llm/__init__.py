"""A replica of a language model with many adapters, an iteration at a time."""
