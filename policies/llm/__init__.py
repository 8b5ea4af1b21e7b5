"""Decisions for language models with many adapters (Flover, Chameleon)."""
